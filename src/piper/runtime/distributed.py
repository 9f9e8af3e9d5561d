"""Distributed: the transport over torch.distributed process groups."""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.plan.types import Plan
from piper.runtime.transport import Exchange, Pending

TIMEOUT = timedelta(seconds=120)  # a peer that does not come ends the run


class Communicators:
    """Process groups by (ranks, stream); they outlive plans."""

    def __init__(self) -> None:
        self.groups: dict[tuple[tuple[int, ...], str], Any] = {}

    def prepare(self, plan: Plan) -> None:
        """Make what a plan needs. All ranks make all groups in one order: torch names a group by how
        many there were before, so that members that made different others would never meet."""
        for ranks, stream in sorted(_needed(plan) - self.groups.keys()):
            self.groups[ranks, stream] = dist.new_group(list(ranks), timeout=TIMEOUT)


def _needed(plan: Plan) -> set[tuple[tuple[int, ...], str]]:
    found = set()
    for part in plan.classes:
        used = {
            (task.group, task.stream)
            for task in part.tasks
            if task.group >= 0 and task.kind != "read"
        }
        for rank in plan.mesh.ranks(part.slice):
            for group, stream in used:
                found.add((plan.groups[group].ranks(plan.mesh, rank), plan.streams[stream].name))
    return found


class DistributedTransport:
    def __init__(self, communicators: Communicators) -> None:
        self.groups = communicators.groups

    def start(
        self, exchange: Exchange, tensors: list[Tensor], splits: list[list[int]] | None
    ) -> Pending:
        group = self.groups[exchange.ranks, exchange.stream]
        match exchange.task.kind:
            case "send":
                work = dist.isend(tensors[0], exchange.peer, group=group, tag=_tag(exchange))
                return _Work([work], keep=tensors)
            case "recv":
                (slot,) = exchange.outputs
                into = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
                work = dist.irecv(into, exchange.peer, group=group, tag=_tag(exchange))
                return _Work([work], results=[into])
            case "all_reduce":
                return _all_reduce(exchange, tensors, group)
            case _:
                return _all_to_all(exchange, tensors[0], splits, group)


def _tag(exchange: Exchange) -> int:
    """Both ends of a message derive the same tag from its key, so that no two are confused."""
    return zlib.crc32(exchange.task.key.encode()) & 0x7FFFFFFF


@dataclass
class _Work:
    works: list[Any]
    results: list[Tensor] | None = None
    keep: list[Tensor] | None = None  # what is being read must live until the end

    def ready(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.results or []


@dataclass
class _Flat:
    """Several tensors reduced as one buffer per dtype."""

    works: list[Any]
    flats: list[tuple[Tensor, list[int]]]
    tensors: list[Tensor]

    def ready(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        results = list(self.tensors)
        for flat, indices in self.flats:
            start = 0
            for index in indices:
                tensor = self.tensors[index]
                part = flat[start : start + tensor.numel()].view(tensor.shape)
                results[index] = part
                start += tensor.numel()
        return results


def _all_reduce(exchange: Exchange, tensors: list[Tensor], group: Any) -> Pending:
    in_place = exchange.task.reads == exchange.task.writes
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(index)
    works, flats = [], []
    for indices in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in indices])
        works.append(dist.all_reduce(flat, group=group, async_op=True))
        flats.append((flat, indices))
    pending = _Flat(works, flats, tensors)
    return _InPlace(pending, tensors) if in_place else pending


@dataclass
class _InPlace:
    """Results go back into the tensors that were reduced: their memory is the slot's for good."""

    pending: _Flat
    tensors: list[Tensor]

    def ready(self) -> bool:
        return self.pending.ready()

    def finish(self) -> list[Tensor]:
        for tensor, result in zip(self.tensors, self.pending.finish(), strict=True):
            tensor.copy_(result)
        return self.tensors


def _all_to_all(
    exchange: Exchange, tensor: Tensor, splits: list[list[int]] | None, group: Any
) -> Pending:
    (slot,) = exchange.outputs
    if splits is None:
        into = torch.empty(slot.shape, dtype=tensor.dtype)
        work = dist.all_to_all_single(into, tensor, group=group, async_op=True)
    else:
        send, receive = reversed(splits) if exchange.task.reverse else splits
        into = torch.empty((sum(receive), *tensor.shape[1:]), dtype=tensor.dtype)
        work = dist.all_to_all_single(into, tensor, receive, send, group=group, async_op=True)
    return _Work([work], results=[into], keep=[tensor])
