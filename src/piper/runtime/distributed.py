"""Distributed: the transport over torch.distributed process groups."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.plan.types import Plan
from piper.runtime.transport import Exchange, Pending

# torch 2.13 has new names for both and warns of the old ones; 2.11 has only those.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        group = self.groups[exchange.ranks, exchange.stream]
        if tensor is None:
            into = _empty(exchange) if into is None else into
            work = dist.irecv(into, exchange.peer, group=group, tag=_tag(exchange))
            return _Work(work, into)
        match exchange.task.kind:
            case "send":
                work = dist.isend(tensor, exchange.peer, group=group, tag=_tag(exchange))
                return _Work(work, keep=tensor)
            case "all_reduce":
                if into is None:
                    into = tensor.clone()
                elif into is not tensor:
                    into.copy_(tensor)
                return _Work(dist.all_reduce(into, group=group, async_op=True), into)
            case "reduce_scatter":
                into = _empty(exchange) if into is None else into
                work = _reduce_scatter(into, tensor, group=group, async_op=True)
                return _Work(work, into, keep=tensor)
            case "all_gather":
                into = _empty(exchange) if into is None else into
                work = _all_gather(into, tensor, group=group, async_op=True)
                return _Work(work, into, keep=tensor)
            case _:
                return _all_to_all(exchange, tensor, splits, into, group)


def _empty(exchange: Exchange) -> Tensor:
    (slot,) = exchange.outputs
    return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))


def _tag(exchange: Exchange) -> int:
    """Both ends of a message derive the same tag from its key, so that no two are confused."""
    return zlib.crc32(exchange.task.key.encode()) & 0x7FFFFFFF


@dataclass
class _Work:
    work: Any
    result: Tensor | None = None
    keep: Tensor | None = None  # what is being read must live until the end

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def finish(self) -> list[Tensor]:
        self.work.wait()
        return [] if self.result is None else [self.result]


def _all_to_all(
    exchange: Exchange,
    tensor: Tensor,
    splits: list[list[int]] | None,
    into: Tensor | None,
    group: Any,
) -> Pending:
    if splits is None:
        into = _empty(exchange) if into is None else into
        work = dist.all_to_all_single(into, tensor, group=group, async_op=True)
    else:
        send, receive = reversed(splits) if exchange.task.reverse else splits
        if into is None:
            into = torch.empty((sum(receive), *tensor.shape[1:]), dtype=tensor.dtype)
        work = dist.all_to_all_single(into, tensor, receive, send, group=group, async_op=True)
    return _Work(work, into, keep=tensor)
