"""Compiling: a rank's bodies through Inductor. Imported only where that is asked for: it takes long."""

from __future__ import annotations

from collections.abc import Mapping

from piper.bodies.inductor.compiled import (
    Body,
    Given,
    Strides,
    compile_bodies,
    eager_body,
    trace_body,
)
from piper.bodies.products import Added
from piper.plan.summed_inside import Part
from piper.plan.tasks import Calling, Run, Task
from piper.plan.types import RankPlan
from piper.runtime.worker.functions import Functions, added_by

Call = tuple[str, Added]


def compiled_functions(
    me: RankPlan, bodies: Mapping[str, str], summed: Mapping[int, Part], *, device: str
) -> Functions:
    """By what each body that a rank runs is called, and the results that it adds to sums."""
    found = _Traced(me, bodies, summed, device)
    for task in me.tasks:
        found.add(task)
    compile_bodies(found.tasks)
    return {call: body.function for call, body in found.bodies.items()}


class _Traced:
    """A rank's bodies, traced in the order of its tasks: how one's results lie, the next reads them."""

    def __init__(
        self, me: RankPlan, texts: Mapping[str, str], summed: Mapping[int, Part], device: str
    ) -> None:
        self.me = me
        self.texts = texts
        self.summed = summed
        self.device = device
        self.bodies: dict[Call, Body] = {}
        self.tasks: dict[Body, str] = {}  # one that runs it
        self._inputs: dict[Call, tuple[Given, ...]] = {}
        self._strides: dict[int, Strides] = {}  # of slots that a body wrote; others are contiguous
        self._unknown: set[int] = set()

    def add(self, task: Task) -> None:
        for slot in task.writes:
            self._strides.pop(slot, None)
            self._unknown.discard(slot)
        if not isinstance(task, Calling):
            return
        call = task.body, added_by(task, self.summed)
        body = self.bodies[call] = self._body(task, call)
        self.tasks.setdefault(body, task.name)
        if not isinstance(task, Run):
            return  # its results are copied to where they belong
        if body.strides is None:
            self._unknown.update(task.writes)
        else:
            self._strides.update(zip(task.writes, body.strides, strict=True))

    def _body(self, task: Calling, call: Call) -> Body:
        text, added = self.texts[task.body], call[1]
        if self._unknown.intersection(task.reads):
            return eager_body(text, "how the results of another body lie is not known", added)
        inputs = tuple(self._given(i) for i in task.reads)
        inputs += tuple(self._sum(i) for i in task.outputs if i in self.summed)
        if self._inputs.setdefault(call, inputs) != inputs:
            return eager_body(text, "its inputs do not always lie alike", added)
        return self.bodies.get(call) or trace_body(text, inputs, self.device, added)

    def _sum(self, term: int) -> Given:
        """Where a result is added."""
        slots = self.me.slots
        return Given(slots[term].shape, slots[self.summed[term].sum].dtype)

    def _given(self, index: int) -> Given:
        slot = self.me.slots[index]
        return Given(slot.shape, slot.dtype, slot.bound, self._strides.get(index))
