"""LoopbackTransport: communication between ranks of one process, by mailboxes and rounds."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.runtime.transport.transport import Exchange, Pending, unknown_kind


class LoopbackTransport:
    """Mailboxes between the workers of one process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[Any, ...], deque[tuple[str, Tensor]]] = defaultdict(deque)
        self.rounds: dict[tuple[Any, ...], list[Round]] = defaultdict(list)
        self.turn: dict[tuple[Any, ...], int] = defaultdict(int)
        self.awaited: dict[tuple[Any, ...], int] = defaultdict(int)  # receives without a send yet

    def clear(self) -> None:
        for held in (self.boxes, self.rounds, self.turn, self.awaited):
            held.clear()

    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        kind = exchange.task.facts
        if kind.receives:
            self.awaited[exchange.peer, exchange.rank, exchange.stream] += 1
            return _Recv(self, exchange)
        assert tensor is not None
        if kind.sends:
            return _Send(self, exchange, tensor)
        if kind.name not in COLLECTIVES:
            raise unknown_kind("loopback", kind.name, COLLECTIVES)
        # The n-th collective of a communicator meets the n-th of every other member.
        channel = (exchange.ranks, exchange.stream)
        turn = self.turn[*channel, exchange.rank]
        self.turn[*channel, exchange.rank] += 1
        if turn == len(self.rounds[channel]):
            self.rounds[channel].append(Round(exchange.ranks, exchange.task.meeting))
        found = self.rounds[channel][turn]
        if found.key != exchange.task.meeting:
            raise RunError(
                f"rank {exchange.rank} runs {exchange.task.meeting} where others run {found.key}"
            )
        found.join(exchange, tensor, splits)
        return _Collective(found, exchange)


@dataclass
class _Send:
    transport: LoopbackTransport
    exchange: Exchange
    tensor: Tensor

    @property
    def channel(self) -> tuple[Any, ...]:
        return self.exchange.rank, self.exchange.peer, self.exchange.stream

    def ready(self) -> bool:
        """A send is over when its peer receives: some transports keep nothing for later."""
        return self.transport.awaited[self.channel] > 0

    def finish(self) -> list[Tensor]:
        self.transport.awaited[self.channel] -= 1
        self.transport.boxes[self.channel].append((self.exchange.task.meeting, self.tensor.clone()))
        return []


@dataclass
class _Recv:
    transport: LoopbackTransport
    exchange: Exchange

    @property
    def box(self) -> deque[tuple[str, Tensor]]:
        return self.transport.boxes[self.exchange.peer, self.exchange.rank, self.exchange.stream]

    def ready(self) -> bool:
        return bool(self.box)

    def finish(self) -> list[Tensor]:
        key, tensor = self.box.popleft()
        if key != self.exchange.task.meeting:
            raise RunError(
                f"rank {self.exchange.rank} received {key} where it expected "
                f"{self.exchange.task.meeting}: sends in another order than receives"
            )
        return [tensor]


@dataclass
class Round:
    """One collective: what each member brought, and, once all are there, what each gets."""

    ranks: tuple[int, ...]
    key: str
    brought: dict[int, Tensor] = field(default_factory=dict)
    splits: dict[int, list[list[int]] | None] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    completed: bool = False
    reverse: bool = False

    def join(self, exchange: Exchange, tensor: Tensor, splits: list[list[int]] | None) -> None:
        send, receive = splits or (None, None)
        if splits and exchange.task.reverse:
            send, receive = receive, send
        self.brought[exchange.rank] = tensor
        self.reverse = exchange.task.reverse
        self.splits[exchange.rank] = [send, receive] if send and receive else None

    def complete(self, kind: str) -> None:
        if not self.completed:
            self.completed = True
            results = COLLECTIVES[kind](self)
            self.results = dict(zip(self.ranks, results, strict=True))

    def cut(self, rank: int) -> Sequence[Tensor]:
        """One rank's rows per receiver; without splits, equal parts."""
        tensor = self.brought[rank]
        splits = self.splits[rank]
        if splits is None:
            return tensor.chunk(len(self.ranks))
        return tensor.split(splits[0])


def _total(round: Round) -> Tensor:
    first, *others = (round.brought[rank] for rank in round.ranks)
    total = first.clone()
    for tensor in others:
        total += tensor
    return total


def _all_reduce(round: Round) -> list[Tensor]:
    total = _total(round)
    return [total.clone() for _ in round.ranks]


def _reduce_scatter(round: Round) -> list[Tensor]:
    return [part.clone() for part in _total(round).chunk(len(round.ranks))]


def _all_gather(round: Round) -> list[Tensor]:
    whole = torch.cat([round.brought[rank] for rank in round.ranks])
    return [whole.clone() for _ in round.ranks]


def _all_to_all(round: Round) -> list[Tensor]:
    rows = [round.cut(rank) for rank in round.ranks]
    return [torch.cat([sent[index] for sent in rows]) for index in range(len(round.ranks))]


def _shift(round: Round) -> list[Tensor]:
    brought = [round.brought[rank] for rank in round.ranks]
    before = 1 if round.reverse else -1
    return [brought[(at + before) % len(brought)].clone() for at in range(len(brought))]


# Per kind, what each rank gets, in the order of ranks, of what all have brought.
COLLECTIVES: dict[str, Callable[[Round], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "shift": _shift,
}


@dataclass
class _Collective:
    round: Round
    exchange: Exchange

    def ready(self) -> bool:
        return len(self.round.brought) == len(self.round.ranks)

    def finish(self) -> list[Tensor]:
        self.round.complete(self.exchange.task.kind)
        result = self.round.results.pop(self.exchange.rank)
        (slot,) = self.exchange.outputs
        return [result.reshape(slot.shape) if slot.bound is None else result]
