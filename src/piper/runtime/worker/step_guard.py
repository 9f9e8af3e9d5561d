"""Guard: keeps a step whose gradients are not finite from changing anything, and finds where it began.

All ranks know the norm of all gradients before anything that they keep is stepped, so that all of them
decide alike. Buffers have changed by then, and get their content of before back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from piper.plan.slots import FILLED
from piper.plan.tasks import NO_SLOT, Comm, Stepping, Task
from piper.runtime.worker.wrapped import Wrapped

if TYPE_CHECKING:
    from piper.runtime.transport.transport import Pending
    from piper.runtime.worker.handlers import Start
    from piper.runtime.worker.worker import Worker


class Culprit(msgspec.Struct, frozen=True):
    """Where a value that is not finite comes from: the task of a rank that made it out of others, or,
    if it was `given`, that read it first; and the slot that it lies in."""

    rank: int
    task: int
    slot: int
    nan: bool
    given: bool


class Guard:
    """Of one Worker. It does nothing unless a step is `on` guard."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.on = False
        self.checks: Checks | None = None  # of a step that is run again
        self._refused: bool | None = None  # once it is known
        self._before: list[tuple[Tensor, Tensor]] = []  # buffers that change, and copies
        self._folded = 0
        changing = {name for name, tensor in worker.plan.tensors.items() if tensor.changes}
        self._buffers = [
            index
            for index, slot in enumerate(worker.me.slots)
            if slot.kind == "buffer" and slot.source in changing
        ]

    def prepare(self, *, on: bool, checked: bool) -> None:
        """For the coming step, which is `checked` if it is run again to see where it fails."""
        self.on = on or checked
        self.checks = Checks(self.worker) if checked else None

    def begin(self) -> None:
        self._refused = None
        if self.on:
            slots = self.worker.slots
            self._before = [(slots[i], slots[i].clone()) for i in self._buffers]
            self._folded = self.worker.steps.folded

    def refuses(self, squares: Tensor) -> bool:
        """Whether nothing may be stepped; `squares` are those of all gradients together."""
        if not self.on:
            return False
        if self._refused is None:
            self._refused = self.checks is not None or not math.isfinite(float(squares))
        return self._refused

    def end(self) -> dict[str, Any]:
        """What there is to say of a step; one that was refused has never been. A rank that steps nothing
        decides as all others do."""
        squares = self.worker.me.results.get("squares", NO_SLOT)
        if self.on and squares != NO_SLOT:
            self.refuses(self.worker.slots[squares])
        if not self._refused:
            return {}
        for buffer, before in self._before:
            buffer.copy_(before)
        self._before = []
        steps = self.worker.steps
        steps.begun -= 1
        steps.folded = self._folded
        if self.checks is None:
            return {"skipped": True}
        return {"skipped": True, "culprits": self.checks.end()}


class Checks:
    """A Worker whose tasks look at what they read and make, for one step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.culprits: dict[tuple[bool, bool], Culprit] = {}  # the first of each kind
        self.written: set[int] = set()  # slots, in this step: what lies there was made, not given
        pairs = zip(worker.me.tasks, worker.starts, strict=True)
        starts = [self._checked(i, task, start) for i, (task, start) in enumerate(pairs)]
        self.wrapped = Wrapped(worker, starts)

    def end(self) -> list[Culprit]:
        """Give the Worker its own tasks back; what was found."""
        self.wrapped.end()
        return list(self.culprits.values())

    def _checked(self, index: int, task: Task, start: Start) -> Start:
        if isinstance(task, Comm | Stepping):
            return start

        def run() -> Pending | None:
            read = {slot: _state(self.worker.slots[slot]) for slot in task.reads}
            for slot, (nan, inf) in read.items():
                if self.worker.me.slots[slot].kind in FILLED and slot not in self.written:
                    self._note(index, slot, nan, inf, given=True)
            pending = start()
            self.written.update(task.writes)
            known_nan = any(nan for nan, _ in read.values())
            known_inf = any(inf for _, inf in read.values())
            for slot in task.writes:
                nan, inf = _state(self.worker.slots[slot])
                new_inf = inf and not (known_inf or known_nan)
                self._note(index, slot, nan and not known_nan, new_inf, given=False)
            return pending

        return run

    def _note(self, index: int, slot: int, nan: bool, inf: bool, *, given: bool) -> None:
        for kind, there in ((True, nan), (False, inf)):
            if there and (kind, given) not in self.culprits:
                rank = self.worker.me.rank
                self.culprits[kind, given] = Culprit(rank, index, slot, kind, given)


def _state(value: Any) -> tuple[bool, bool]:
    """Whether a tensor has a NaN, and an infinity."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False, False
    return bool(torch.isnan(value).any()), bool(torch.isinf(value).any())
