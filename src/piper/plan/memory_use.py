"""Memory by use: the slots and tasks of a class in; what the memory of each slot is for, out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from piper.plan.slots import Slot
from piper.plan.tasks import Run, Task

Use = Literal["parameters", "gradients", "saved", "gathered", "buffers"]
USES: tuple[Use, ...] = ("parameters", "gradients", "saved", "gathered", "buffers")
_BY_KIND: dict[str, Use] = {
    "param": "parameters",
    "flat": "parameters",
    "shard": "parameters",
    "grad": "gradients",
    "unreduced": "gradients",
    "gathered": "gathered",
}


def memory_use(slots: Sequence[Slot], tasks: Sequence[Task]) -> list[Use]:
    """Saved is what a forward leaves for a backward, and what a backward leaves for its weight part;
    gradients are those of parameters, and their sums."""
    saved = _saved(tasks)
    return [_use(slot, index in saved) for index, slot in enumerate(slots)]


def _use(slot: Slot, saved: bool) -> Use:
    by_kind = _BY_KIND.get(slot.kind)
    if by_kind is not None:
        return by_kind
    if slot.kind == "temp" and (slot.source or slot.bucket >= 0):
        return "gradients"
    if slot.kind == "sum" and slot.bucket >= 0:
        return "gradients"
    return "saved" if saved and slot.kind == "temp" else "buffers"


def _saved(tasks: Sequence[Task]) -> set[int]:
    forward: set[int] = set()
    backward: set[int] = set()
    late: set[int] = set()  # read by weight parts
    left: set[int] = set()  # made by other parts
    for task in tasks:
        if isinstance(task, Run):
            if task.phase == "F":
                forward.update(task.inputs, task.outputs)
            else:
                (late if task.phase == "BW" else backward).update(task.inputs)
                left.update(task.outputs)
    return forward & (backward | late) | left & late
