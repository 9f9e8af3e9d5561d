"""Distributed: the transport over torch.distributed process groups, gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.ir.graph import Stream
from piper.plan.tasks import Comm
from piper.plan.types import Plan
from piper.runtime.transport.gates import Gate, Gates
from piper.runtime.transport.transport import Exchange, Pending, unknown_kind

# torch 2.13 has new names for both and warns of the old ones; 2.11 has only those.
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Longer than anybody watches a step: whoever watches says more than a timeout of torch's.
TIMEOUT = timedelta(hours=1)

Channel = tuple[tuple[int, ...], Stream]


class Communicators:
    """Process groups by (ranks, stream); they outlive plans."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.groups: dict[Channel, Any] = {}
        self.messages: Any = None  # on CPUs, where messages have tags, one group for all of them
        self.gates: Gates | None = None  # where all ranks are on one machine
        self.gate_of: dict[Channel, Gate] = {}

    def prepare(self, plan: Plan) -> None:
        """Make what a plan needs. All ranks make all groups in one order: torch names a group by how
        many there were before, so that members that made different others would never meet."""
        tagged = self.device.type == "cpu"
        if tagged and self.messages is None and any(t.facts.is_message for t in _comms(plan)):
            self.messages = dist.new_group(timeout=TIMEOUT)
        for channel in sorted(_needed(plan, tagged) - self.groups.keys(), key=_order):
            ranks, stream = channel
            if self.device.type == "cpu":
                self.groups[channel] = dist.new_group(list(ranks), timeout=TIMEOUT)
                continue
            self.groups[channel] = dist.new_group(
                list(ranks), timeout=TIMEOUT, backend="nccl", pg_options=_nccl_options(stream)
            )
            if self.gates is not None:
                self.gate_of[channel] = self.gates.gate()
            if dist.get_rank() in ranks:
                self._connect(channel)

    def _connect(self, channel: Channel) -> None:
        """NCCL connects at the first use, which is here and not within a step."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.groups[channel])
        torch.cuda.synchronize(self.device)


def _order(channel: Channel) -> tuple[Any, ...]:
    ranks, stream = channel
    return ranks, stream.name, stream.priority, stream.max_sms or 0


def _comms(plan: Plan) -> Iterator[Comm]:
    return (task for part in plan.classes for task in part.tasks if isinstance(task, Comm))


def _needed(plan: Plan, tagged: bool) -> set[Channel]:
    """The channels of all communication of a plan; messages that have tags need none."""
    found = set()
    for part in plan.classes:
        comms = (task for task in part.tasks if isinstance(task, Comm))
        used = {(t.group, t.stream) for t in comms if not (tagged and t.facts.is_message)}
        for rank in plan.mesh.ranks(part.slice):
            for group, stream in used:
                found.add((plan.groups[group].ranks(plan.mesh, rank), plan.streams[stream]))
    return found


def _nccl_options(stream: Stream) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=stream.priority == "high")
    if stream.max_sms is not None:
        options.config.min_ctas = 1
        options.config.max_ctas = stream.max_sms
    return options


class DistributedTransport:
    """On a GPU all communication runs on the current stream. Torch runs messages on streams of its own,
    but not collectives: there a message is a broadcast from one rank to the other."""

    def __init__(self, communicators: Communicators, plan: Plan) -> None:
        communicators.prepare(plan)
        self.groups = communicators.groups
        self.messages = communicators.messages
        self.tags = _tags(plan)
        self.gate_of = communicators.gate_of
        self.device = communicators.device
        self.aside = self.device.type == "cpu"  # else a collective runs on the current stream

    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        kind = exchange.task.comm
        collective = COLLECTIVES.get(kind)
        if collective is None:
            if exchange.task.facts.is_message:
                return self._message(exchange, tensor, into)
            raise unknown_kind("distributed", kind, COLLECTIVES)
        assert tensor is not None
        group = self.groups[exchange.ranks, exchange.stream]
        return collective(self, exchange, tensor, splits, into, group)

    def _message(self, exchange: Exchange, tensor: Tensor | None, into: Tensor | None) -> Pending:
        """Send a tensor, or receive one."""
        if tensor is None and into is None:
            into = self.empty(exchange)
        if self.aside:
            group, tag = self.messages, self.tags[exchange.task.key]
            if tensor is None:
                assert into is not None
                return Work(dist.irecv(into, exchange.peer, group=group, tag=tag), into)
            return Work(dist.isend(tensor, exchange.peer, group=group, tag=tag), keep=tensor)
        channel = exchange.ranks, exchange.stream
        group, gate = self.groups[channel], self.gate_of.get(channel)
        if gate is not None:
            step = gate.pass_through if tensor is None else gate.open
            step(torch.cuda.current_stream().cuda_stream)
        if tensor is None:
            assert into is not None
            return Work(dist.broadcast(into, exchange.peer, group=group), into)
        return Work(dist.broadcast(tensor, exchange.rank, group=group), keep=tensor)

    def empty(self, exchange: Exchange) -> Tensor:
        """Memory for what a communication leaves."""
        (slot,) = exchange.outputs
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self.device)


Splits = list[list[int]] | None
Collective = Callable[[DistributedTransport, Exchange, Tensor, Splits, Tensor | None, Any], Pending]


def _all_reduce(
    transport: DistributedTransport,
    exchange: Exchange,
    tensor: Tensor,
    splits: Splits,
    into: Tensor | None,
    group: Any,
) -> Pending:
    if into is None:
        into = tensor.clone()
    elif into is not tensor:
        into.copy_(tensor)
    return Work(dist.all_reduce(into, group=group, async_op=transport.aside), into)


def _into_memory(call: Any) -> Collective:
    """A collective of torch's that fills a tensor from another one."""

    def collective(
        transport: DistributedTransport,
        exchange: Exchange,
        tensor: Tensor,
        splits: Splits,
        into: Tensor | None,
        group: Any,
    ) -> Pending:
        into = transport.empty(exchange) if into is None else into
        # Parts and wholes may differ in their number of dims, of which gloo knows nothing.
        flat, part = into.view(-1), tensor.reshape(-1)
        work = call(flat, part, group=group, async_op=transport.aside)
        return Work(work, into, keep=part)

    return collective


def _reduce_scatter(
    transport: DistributedTransport,
    exchange: Exchange,
    tensor: Tensor,
    splits: Splits,
    into: Tensor | None,
    group: Any,
) -> Pending:
    """Gloo's own reduces everything everywhere, too, but never says that it is over."""
    if not transport.aside:
        return _REDUCE_SCATTER(transport, exchange, tensor, splits, into, group)
    into = transport.empty(exchange) if into is None else into
    whole = tensor.clone(memory_format=torch.contiguous_format)
    size = into.numel()
    begin = exchange.ranks.index(exchange.rank) * size
    part = whole.view(-1)[begin : begin + size].view(into.shape)
    return _Part(dist.all_reduce(whole, group=group, async_op=True), into, part)


def _all_to_all(
    transport: DistributedTransport,
    exchange: Exchange,
    tensor: Tensor,
    splits: Splits,
    into: Tensor | None,
    group: Any,
) -> Pending:
    send = receive = None
    if splits is not None:
        send, receive = reversed(splits) if exchange.task.reverse else splits
        shape = (sum(receive), *tensor.shape[1:])
        into = torch.empty(shape, dtype=tensor.dtype, device=transport.device)
    elif into is None:
        into = transport.empty(exchange)
    aside = transport.aside
    work = dist.all_to_all_single(into, tensor, receive, send, group=group, async_op=aside)
    return Work(work, into, keep=tensor)


def _shift(
    transport: DistributedTransport,
    exchange: Exchange,
    tensor: Tensor,
    splits: Splits,
    into: Tensor | None,
    group: Any,
) -> Pending:
    """To the next rank of the group, or to the one before: all that a rank brings goes to one other."""
    into = transport.empty(exchange) if into is None else into
    size, place = len(exchange.ranks), exchange.ranks.index(exchange.rank)
    onward = -1 if exchange.task.reverse else 1
    part = tensor.reshape(-1)
    send, receive = [0] * size, [0] * size
    send[(place + onward) % size] = receive[(place - onward) % size] = part.numel()
    aside = transport.aside
    work = dist.all_to_all_single(into.view(-1), part, receive, send, group=group, async_op=aside)
    return Work(work, into, keep=part)


_REDUCE_SCATTER = _into_memory(reduce_scatter_single)
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _into_memory(all_gather_single),
    "all_to_all": _all_to_all,
    "shift": _shift,
}


def _tags(plan: Plan) -> dict[str, int]:
    """A number for each message of a plan, the same on all ranks."""
    keys = sorted({task.key for task in _comms(plan) if task.facts.is_message})
    return {key: number for number, key in enumerate(keys)}


@dataclass
class Work:
    work: Any  # None if the current stream has it already
    result: Tensor | None = None
    keep: Tensor | None = None  # what is being read must live until the end

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def finish(self) -> list[Tensor]:
        if self.work is not None:
            self.work.wait()
        return [] if self.result is None else [self.result]


@dataclass
class _Part:
    """Of what is reduced, the part that stays here."""

    work: Any
    result: Tensor
    part: Tensor

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def finish(self) -> list[Tensor]:
        self.work.wait()
        return [self.result.copy_(self.part)]
