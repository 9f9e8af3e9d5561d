"""Faults in a run: one tensor's gradient, its update or the loss is off, on every rank alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

from piper.api.run import Run, StepResult
from piper.plan.holdings import held_in
from piper.plan.tasks import Update
from piper.runtime.worker.handlers import HANDLERS, Start
from piper.runtime.worker.worker import Worker


@contextlib.contextmanager
def planted(
    what: Literal["gradient", "update", "loss"],
    name: str = "",
    *,
    factor: float = 1 + 1e-6,
    added: float = 0.0,
    elements: slice = slice(None),
) -> Iterator[None]:
    """While runs are made and stepped; `added` comes on top of every element. Of a tensor that is
    nowhere cut, only these `elements`."""
    if what == "loss":
        step = Run.step

        def wrong_loss(self: Run, batch: Any = None) -> StepResult:
            result = step(self, batch)
            return replace(result, loss=result.loss * factor + added)

        with patch.object(Run, "step", wrong_loss):
            yield
        return
    update = HANDLERS[Update]

    def faulty(worker: Worker, task: Update) -> Start:
        start = update(worker, task)

        def change(slots: tuple[int, ...]) -> None:
            for slot in slots:
                for held in held_in(worker.plan, worker.me, slot):
                    if held.tensor == name:
                        last = held.offset + held.last - held.first
                        values = worker.slots[slot].view(-1)[held.offset : last]
                        values[elements].mul_(factor).add_(added)

        def run() -> Any:
            if what == "gradient":
                change((task.gradient,))
            pending = start()
            if what == "update":
                change(task.stepped)
            return pending

        return run

    with patch.dict(HANDLERS, {Update: faulty}):
        yield
