"""Compiling: a rank's bodies through Inductor. Imported only where that is asked for: it takes long."""

from __future__ import annotations

from collections.abc import Mapping

from piper.bodies.inductor.compiled import (
    Body,
    Function,
    Given,
    Strides,
    compile_bodies,
    eager_body,
    trace_body,
)
from piper.plan.tasks import Calling, Run, Task
from piper.plan.types import RankPlan


def compiled_functions(
    me: RankPlan, bodies: Mapping[str, str], *, device: str
) -> dict[str, Function]:
    """By what each body that a rank runs is called."""
    found = _Traced(me, bodies, device)
    for task in me.tasks:
        found.add(task)
    compile_bodies(found.tasks)
    return {name: body.function for name, body in found.bodies.items()}


class _Traced:
    """A rank's bodies, traced in the order of its tasks: how one's results lie, the next reads them."""

    def __init__(self, me: RankPlan, texts: Mapping[str, str], device: str) -> None:
        self.me = me
        self.texts = texts
        self.device = device
        self.bodies: dict[str, Body] = {}
        self.tasks: dict[Body, str] = {}  # one that runs it
        self._inputs: dict[str, tuple[Given, ...]] = {}
        self._strides: dict[int, Strides] = {}  # of slots that a body wrote; others are contiguous
        self._unknown: set[int] = set()

    def add(self, task: Task) -> None:
        for slot in task.writes:
            self._strides.pop(slot, None)
            self._unknown.discard(slot)
        if not isinstance(task, Calling):
            return
        body = self._body(task)
        self.bodies[task.body] = body
        self.tasks.setdefault(body, task.name)
        if not isinstance(task, Run):
            return  # its results are copied to where they belong
        if body.strides is None:
            self._unknown.update(task.writes)
        else:
            self._strides.update(zip(task.writes, body.strides, strict=True))

    def _body(self, task: Calling) -> Body:
        text = self.texts[task.body]
        if self._unknown.intersection(task.reads):
            return eager_body(text, "how the results of another body lie is not known")
        inputs = tuple(self._given(i) for i in task.reads)
        if self._inputs.setdefault(task.body, inputs) != inputs:
            return eager_body(text, "its inputs do not always lie alike")
        before = self.bodies.get(task.body)
        return before or trace_body(text, inputs, self.device)

    def _given(self, index: int) -> Given:
        slot = self.me.slots[index]
        return Given(slot.shape, slot.dtype, slot.bound, self._strides.get(index))
