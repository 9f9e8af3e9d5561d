"""Loopback: all ranks in one process, on real tensors, in any order that the plan allows.

The adversary picks a legal order at random, lets a stream starve for long, and overwrites freed memory
with NaN, so that a plan with a missing wait or an early free gives wrong results or is caught here.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.plan.tasks import sends
from piper.plan.types import Plan
from piper.runtime.launch.devices import device_facts
from piper.runtime.launch.pool_run import Reading
from piper.runtime.launch.shares import share_of
from piper.runtime.transport.transport import Exchange, Pending, unknown_kind
from piper.runtime.worker.storages import measured_bytes
from piper.runtime.worker.worker import Worker


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

    def join(self, exchange: Exchange, tensor: Tensor, splits: list[list[int]] | None) -> None:
        send, receive = splits or (None, None)
        if splits and exchange.task.reverse:
            send, receive = receive, send
        self.brought[exchange.rank] = tensor
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


# Per kind, what each rank gets, in the order of ranks, of what all have brought.
COLLECTIVES: dict[str, Callable[[Round], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
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


class Loopback:
    """All workers of a plan; `step` runs them until every task is done.

    `observe` sees a worker after each thing that it did, so that what it holds can be measured.
    """

    reading: Reading = "driver"

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        *,
        adversary: bool = False,
        seed: int = 0,
        observe: Callable[[Worker], None] | None = None,
        compile: bool = False,
    ) -> None:
        self.plan = plan
        self.adversary = adversary
        self.observe = observe
        self.random = random.Random(seed)
        self.transport = LoopbackTransport()
        self.workers = [
            Worker(plan, rank, bodies=bodies, transport=self.transport, compile=compile)
            for rank in range(plan.mesh.size)
        ]
        self.evaluating: list[Worker] = []

    def step(self, leaves: Mapping[str, Tensor]) -> list[dict[str, float]]:
        return self._run(self.workers, leaves)

    def evaluate(
        self, plan: Plan, bodies: Mapping[str, str], leaves: Mapping[str, Tensor]
    ) -> list[dict[str, float]]:
        """Run an evaluation of the plan on its live parameters."""
        self.load(plan, bodies, "eval")
        return self._run(self.evaluating, leaves)

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        if not self.evaluating:
            self.evaluating = [
                Worker(plan, w.me.rank, bodies=bodies, transport=self.transport, shares=w)
                for w in self.workers
            ]

    def _run(self, workers: list[Worker], leaves: Mapping[str, Tensor]) -> list[dict[str, float]]:
        engines = []
        for worker in workers:
            share = share_of(worker.plan, leaves, worker.me.data_rank)
            worker.load_batch({k: v.clone() for k, v in share.items()})
            engines.append(_Engine(worker, poison=self.adversary))
        try:
            with torch.no_grad():
                self._drive(engines)
        finally:  # a step that failed leaves nothing for the next one
            self.transport.clear()
        return [worker.results() for worker in workers]

    def _drive(self, engines: list[_Engine]) -> None:
        favour: dict[tuple[int, int], float] = {}
        patience = 0
        engine = engines[0]
        while True:  # who was able to go on is asked first
            options: Iterator[tuple[_Engine, int]] = (
                (e, stream) for e in (engine, *engines) for stream in e.options()
            )
            if self.adversary:
                known = [(e, stream) for e in engines for stream in e.options()]
                if patience == 0:
                    favour = {(e.worker.me.rank, s): self.random.random() for e, s in known}
                    patience = self.random.randint(1, 40)
                patience -= 1
                known.sort(key=lambda o: favour.get((o[0].worker.me.rank, o[1]), 0.5))
                options = iter(known)
            found = next(options, None)
            if found is None:
                break
            engine, stream = found
            engine.advance(stream)
            if self.observe is not None:
                self.observe(engine.worker)
        stuck = [engine.waiting() for engine in engines if not engine.done]
        if stuck:
            raise RunError("no rank can go on", details=[line for lines in stuck for line in lines])

    def set_options(self, options: Mapping[str, Any]) -> None:
        for worker in self.workers:
            worker.set_options(options)

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return [worker.tensors(kind) for worker in self.workers]

    def memory(self) -> list[dict[str, int]]:
        return [measured_bytes(worker) for worker in self.workers]

    def describe(self) -> list[dict[str, str]]:
        return [device_facts(worker.device) for worker in self.workers]

    def close(self) -> None:
        self.workers.clear()
        self.evaluating.clear()


class _Engine:
    """One rank under the engine: its streams as queues, its host dispatching tasks in order."""

    def __init__(self, worker: Worker, *, poison: bool) -> None:
        self.worker = worker
        self.poison = poison
        self.tasks = worker.me.tasks
        self.queues: dict[int, deque[int]] = defaultdict(deque)
        self.complete: set[int] = set()
        self.pending: dict[int, Pending] = {}
        self.sending: dict[int, int] = defaultdict(int)  # slot -> sends of it that are not over
        self.kept: set[int] = set()  # slots that are freed when those are
        self.dispatched = 0
        self._dispatch()

    @property
    def done(self) -> bool:
        return len(self.complete) == len(self.tasks)

    def _dispatch(self) -> None:
        """The host runs ahead until a task makes it read something."""
        while self.dispatched < len(self.tasks):
            task = self.tasks[self.dispatched]
            self.queues[task.stream].append(self.dispatched)
            self.dispatched += 1
            for slot in task.reads if sends(task) else ():
                self.sending[slot] += 1
            if task.blocks:
                return

    def options(self) -> Iterator[int]:
        """The streams that can go on, those whose next task was dispatched first in front."""
        heads = sorted((queue[0], stream) for stream, queue in self.queues.items() if queue)
        return (stream for index, stream in heads if self._can_go_on(index))

    def _can_go_on(self, index: int) -> bool:
        if index in self.pending:
            return self.pending[index].ready()
        return all(before in self.complete for before in self.tasks[index].waits)

    def advance(self, stream: int) -> None:
        index = self.queues[stream][0]
        self._check_reads(index)
        if index not in self.pending:
            pending = self.worker.starts[index]()
            if pending is not None:
                self.pending[index] = pending
                self._poison_buffers(index)
                return
        else:
            self.worker.write(index, self.pending.pop(index).finish())
        self._release(index)
        self.queues[stream].popleft()
        self.complete.add(index)
        if self.tasks[index].blocks:
            self._dispatch()

    def _poison_buffers(self, index: int) -> None:
        """A communication may write its buffer from its start on, whoever still reads it."""
        for slot in self.tasks[index].writes if self.poison else ():
            if slot in self.worker.pooled:
                tensor = self.worker.pooled[slot]
                tensor.fill_(_poison(tensor.dtype))

    def _check_reads(self, index: int) -> None:
        for slot in self.tasks[index].reads:
            if self.worker.slots[slot] is None:
                raise RunError(
                    f"rank {self.worker.me.rank}: {self.tasks[index].name} reads "
                    f"{self.worker.me.slots[slot].name}, which is not there",
                    details=["it was not written yet, or already freed: a wait is missing"],
                )

    def _release(self, index: int) -> None:
        """Free what a task frees, but not what a send dispatched before it still has to read."""
        task = self.tasks[index]
        for slot in task.reads if sends(task) else ():
            self.sending[slot] -= 1
            if not self.sending[slot] and slot in self.kept:
                self._free(slot)
        for slot in task.frees:
            if self.sending[slot] and self._sent_before(slot, index):
                self.kept.add(slot)
            else:
                self._free(slot)

    def _sent_before(self, slot: int, index: int) -> bool:
        return any(
            sends(task) and slot in task.reads and at not in self.complete
            for at, task in enumerate(self.tasks[:index])
        )

    def _free(self, slot: int) -> None:
        tensor = self.worker.slots[slot]
        if self.poison and isinstance(tensor, Tensor):
            tensor.fill_(_poison(tensor.dtype))
        self.worker.free(slot)
        self.kept.discard(slot)

    def waiting(self) -> list[str]:
        lines = []
        for stream, queue in self.queues.items():
            if queue:
                task = self.tasks[queue[0]]
                missing = [self.tasks[w].name for w in task.waits if w not in self.complete]
                name = self.worker.plan.streams[stream].name
                why = f"after {', '.join(missing)}" if missing else "for its peers"
                lines.append(f"rank {self.worker.me.rank} {name}: {task.name} waits {why}")
        return lines


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
