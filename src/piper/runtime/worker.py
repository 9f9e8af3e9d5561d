"""Worker: one rank's Tasks, prepared once and run every step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piper.bodies.store import load
from piper.errors import RunError
from piper.plan.types import Plan, Slot, Task, bind
from piper.runtime.keys import Keys
from piper.runtime.transport import Exchange, Pending, Transport
from piper.runtime.update import Updater
from piper.runtime.weights import initial_value

Start = Callable[[], Pending | None]


class PeerError(Exception):
    """A communication broke off, most likely because a peer is gone."""

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(f"{task} broke off: {reason}")


class Worker:
    """Executes the plan of one rank over a transport.

    `slots` holds every tensor; a task is started, finished (if it communicates) and then releases
    what it frees. `step` does so in dispatch order; the loopback engine in any order that the plan's
    streams and waits allow.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        bodies: Mapping[str, str],
        transport: Transport,
        device: str = "cpu",
    ) -> None:
        self.plan = plan
        self.me = bind(plan, rank)
        self.device = torch.device(device)
        self.transport = transport
        self.slots: list[Any] = [None] * len(self.me.slots)
        self.batch_slots = [(i, s) for i, s in enumerate(self.me.slots) if s.kind == "batch"]
        self.keys = Keys(plan, self.me, self.device)
        self._fill_model(bodies)
        self._functions = {
            task.body: load(bodies[task.body]) for task in self.me.tasks if task.body
        }
        prepare = {
            "run": self._run, "add": self._add, "read": self._read, "update": self._update,
            "send": self._exchange, "recv": self._exchange, "all_reduce": self._exchange,
            "all_to_all": self._exchange,
        }  # fmt: skip
        self.starts: list[Start] = [prepare[task.kind](task) for task in self.me.tasks]
        self._before = _finished_before(self.me.tasks)
        self._pending: dict[int, deque[tuple[int, Pending]]] = defaultdict(deque)  # per stream
        self._at = 0

    def _fill_model(self, bodies: Mapping[str, str]) -> None:
        for index, slot in enumerate(self.me.slots):
            if slot.kind in ("param", "buffer"):
                tensor = self.plan.tensors[slot.source]
                whole = initial_value(tensor, bodies, seed=self.plan.seed)
                part, parts = self.me.part_of(slot, self.plan.mesh)
                rows = whole.chunk(parts)[part] if parts > 1 else whole
                self.slots[index] = rows.clone().to(self.device)
            elif slot.kind == "grad":
                self.slots[index] = self._empty(slot)
            elif slot.kind == "constant":
                self.slots[index] = self._empty(slot).fill_(float(slot.source))

    def _empty(self, slot: Slot) -> Tensor:
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self.device)

    # One function per kind of task: given the task, returns what to call when it starts.

    def _run(self, task: Task) -> Start:
        function, slots, reads, writes = (
            self._functions[task.body],
            self.slots,
            task.reads,
            task.writes,
        )

        def start() -> None:
            results = function(*[slots[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                slots[i] = result

        return start

    def _add(self, task: Task) -> Start:
        slots = self.slots
        pairs = list(zip(task.reads, task.writes, task.first, strict=True))
        stays = {i for i in task.writes if self.me.slots[i].kind == "grad"}
        copied = [(source, total) for source, total, first in pairs if first and total in stays]
        added = [(source, total) for source, total, first in pairs if not first]
        made = [
            (source, total, getattr(torch, self.me.slots[total].dtype))
            for source, total, first in pairs
            if first and total not in stays
        ]

        def start() -> None:
            if copied:
                torch._foreach_copy_([slots[t] for _, t in copied], [slots[s] for s, _ in copied])
            if added:
                torch._foreach_add_([slots[t] for _, t in added], [slots[s] for s, _ in added])
            for source, total, dtype in made:
                slots[total] = slots[source].to(dtype, copy=True)

        return start

    def _read(self, task: Task) -> Start:
        sent, received = task.reads
        (target,) = task.writes
        peers = len(self.me.groups[task.group])

        def start() -> None:
            rows = [self.slots[i].reshape(peers, -1).sum(1) for i in (sent, received)]
            self.slots[target] = torch.stack(rows).tolist()

        return start

    def _update(self, task: Task) -> Start:
        params = [self.slots[i] for i in task.writes]
        updater = Updater(self.plan.optimizer, params)
        grads, counts = task.reads[: len(params)], task.reads[len(params) :]

        def start() -> None:
            divisor: Any = self.slots[counts[0]] if counts else task.count
            if counts and float(divisor) == 0:
                raise RunError("the total count of the batch is 0: there is nothing to average")
            updater.step([self.slots[i] for i in grads], divisor)

        return start

    def _exchange(self, task: Task) -> Start:
        exchange = Exchange(
            task=task,
            stream=self.plan.streams[task.stream].name,
            rank=self.me.rank,
            ranks=self.me.groups[task.group],
            outputs=tuple(self.me.slots[i] for i in task.writes),
        )
        hosts = [i for i in task.reads if self.me.slots[i].kind == "host"]
        tensors = [i for i in task.reads if i not in hosts]

        def start() -> Pending:
            splits = self.slots[hosts[0]] if hosts else None
            return self.transport.start(exchange, [self.slots[i] for i in tensors], splits)

        return start

    # Running

    def load_batch(self, leaves: Mapping[str, Tensor]) -> None:
        """Begin a step: every microbatch gets its rows of this rank's share, and its keys."""
        num = self.plan.num_microbatches
        for index, slot in self.batch_slots:
            leaf = leaves[slot.source]
            rows = leaf.shape[0] // num
            part = leaf[slot.microbatch * rows : (slot.microbatch + 1) * rows]
            self.slots[index] = part.to(self.device).contiguous()
        self.keys.load(self.slots)

    def step(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """One training step in dispatch order; the loss and count of the whole batch."""
        self.load_batch(leaves)
        with torch.no_grad():
            for index, start in enumerate(self.starts):
                self._at = index
                self._start(index, start)
            for stream in self._pending:
                self._finish(stream, len(self.starts))
        return self.results()

    def _start(self, index: int, start: Start) -> None:
        for before in self._before[index]:
            self._finish(self.me.tasks[before].stream, before)
        pending = start()
        if pending is None:
            self.release(index)
            return
        queue = self._pending[self.me.tasks[index].stream]
        while queue and queue[0][1].ready():
            self._finish(self.me.tasks[index].stream, queue[0][0])
        queue.append((index, pending))

    def _finish(self, stream: int, last: int) -> None:
        """Finish a stream's communications up to task `last`: a stream is in order."""
        queue = self._pending[stream]
        while queue and queue[0][0] <= last:
            index, pending = queue.popleft()
            try:
                results = pending.finish()
            except RuntimeError as error:
                raise PeerError(self.me.tasks[index].name, str(error)) from error
            self.write(index, results)
            self.release(index)

    @property
    def current_task(self) -> str:
        """The task that was started last, for errors."""
        return self.me.tasks[self._at].name

    def write(self, index: int, results: list[Tensor]) -> None:
        for slot, result in zip(self.me.tasks[index].writes, results, strict=True):
            self.slots[slot] = result

    def release(self, index: int) -> None:
        for slot in self.me.tasks[index].frees:
            self.slots[slot] = None

    def results(self) -> dict[str, float]:
        found = {name: float(self.slots[i]) for name, i in self.me.results.items()}
        found.setdefault("count", float(self.plan.num_data_ranks * self.plan.num_microbatches))
        return found

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """This rank's parts of all parameters, or of their last gradients, by name in the model."""
        return {s.source: self.slots[i] for i, s in enumerate(self.me.slots) if s.kind == kind}


def _finished_before(tasks: tuple[Task, ...]) -> list[tuple[int, ...]]:
    """Per task, the communications that must be finished first: its waits, and earlier ones of its own
    stream that touch the same slots (a stream runs in order, so that the plan has no wait for them)."""
    found: list[tuple[int, ...]] = []
    touched: dict[tuple[int, int], int] = {}  # (stream, slot) -> last communication
    for index, task in enumerate(tasks):
        slots = (*task.reads, *task.writes, *task.frees)
        own = [touched[task.stream, s] for s in slots if (task.stream, s) in touched]
        found.append(tuple(dict.fromkeys((*task.waits, *own))))
        if task.group >= 0 and task.kind != "read":
            for slot in slots:
                touched[task.stream, slot] = index
    return found
