"""Faults of layouts, one kind a function: a good plan whose tensors are cut in, bad ones out.

Each breaks a row of the table of layouts, forward or backward, or what code was traced for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piper.ir.layouts import PARTIAL, REPLICATED, Layouts, Split, is_read_as
from piper.plan.slots import Slot
from piper.plan.tasks import NO_SLOT, Comm
from piper.plan.types import Plan, RankClass
from tests.faults import COLLECTIVES, Fault, Plant, changed, each, fault


def _changes(plan: Plan) -> Iterator[tuple[int, RankClass, int, Comm]]:
    """Collectives along axes that share tensors."""
    for number, part, index, task in each(plan, *COLLECTIVES):
        cut = {axis for axis, _ in part.slots[task.source].cut}
        if cut & {*plan.groups[task.group].over}:
            yield number, part, index, task


def _with_slot(plan: Plan, number: int, index: int, **changes: object) -> Plan:
    part = plan.classes[number]
    slots = list(part.slots)
    slots[index] = msgspec.structs.replace(slots[index], **changes)
    part = msgspec.structs.replace(part, slots=tuple(slots))
    classes = (*plan.classes[:number], part, *plan.classes[number + 1 :])
    return msgspec.structs.replace(plan, classes=classes)


def _swapped(slots: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    return tuple(new if slot == old else slot for slot in slots)


def _alike(one: Layouts, other: Layouts) -> bool:
    ways = dict(other)
    return ways.keys() == dict(one).keys() and all(is_read_as(w, ways[a]) for a, w in one)


def over_another_axis(plan: Plan) -> Iterator[Fault]:
    """A collective of one axis goes over another one."""
    for number, _, index, task in _changes(plan):
        mine = plan.groups[task.group]
        for other, group in enumerate(plan.groups):
            if group.slices == mine.slices and group.over != mine.over:
                changes = changed(plan, number, index, group=other)
                yield fault(changes, "layouts collectives", task.name)


def of_another_kind(plan: Plan) -> Iterator[Fault]:
    """Another collective, which leaves a tensor of the same shape."""
    same = ("all_reduce", "all_to_all", "shift")
    for number, _, index, task in _changes(plan):
        for kind in same if task.comm in same else ():
            if kind != task.comm:
                changes = changed(plan, number, index, comm=kind, reverse=False)
                yield fault(changes, "layouts collectives structure", task.name)


def the_wrong_way_round(plan: Plan) -> Iterator[Fault]:
    """What is shifted goes to the other neighbour."""
    for number, _, index, task in _changes(plan):
        if task.comm == "shift":
            changes = changed(plan, number, index, reverse=not task.reverse)
            yield fault(changes, "layouts", task.name)


def left_out(plan: Plan) -> Iterator[Fault]:
    """A reader has what a collective was to change as it was before: terms that nobody has summed, heads
    or sequences that nobody has turned, another rank's keys."""
    for number, part, _, task in _changes(plan):
        source, target = part.slots[task.source], part.slots[task.target]
        if source.type != target.type:
            continue
        for index, other in enumerate(part.tasks):
            if other.kind == "run" and task.target in other.inputs:
                inputs = _swapped(other.inputs, task.target, task.source)
                changes = changed(plan, number, index, inputs=inputs)
                yield fault(changes, "layouts memory events", other.name)


def read_in_another_layout(plan: Plan) -> Iterator[Fault]:
    """A body reads a Value of the same type that lies otherwise: also a gradient."""
    for number, part, index, task in each(plan, "run"):
        for slot in dict.fromkeys(task.inputs):
            for other in _unlike(part, slot, task.reads):
                inputs = _swapped(task.inputs, slot, other)
                changes = changed(plan, number, index, inputs=inputs)
                yield fault(changes, "layouts memory events", task.name)


def made_in_another_layout(plan: Plan) -> Iterator[Fault]:
    """What a body makes is said to lie otherwise: whole instead of a term or a part of it, and so on."""
    for number, part, _, task in each(plan, "run"):
        for slot in task.outputs:
            for cut in _other_layouts(part.slots[slot]):
                yield fault(_with_slot(plan, number, slot, cut=cut), "layouts", task.name)


def communicated_to_another_layout(plan: Plan) -> Iterator[Fault]:
    """What a collective makes is said to lie otherwise: gathered along another dim or in other blocks,
    of another turn, still a term."""
    for number, part, _, task in _changes(plan):
        readers = [t.name for t in part.tasks if task.target in t.reads]
        for cut in _other_layouts(part.slots[task.target]):
            changes = _with_slot(plan, number, task.target, cut=cut)
            yield fault(changes, "layouts", task.name, *readers)


def added_in_another_layout(plan: Plan) -> Iterator[Fault]:
    """A term lies otherwise than the sum of gradients that it is added to."""
    for number, part, index, task in each(plan, "add"):
        for term in task.terms:
            for other in _unlike(part, term, task.reads):
                terms = _swapped(task.terms, term, other)
                changes = changed(plan, number, index, terms=terms)
                yield fault(changes, "layouts memory events updates", task.name)


def _unlike(part: RankClass, slot: int, read: tuple[int, ...]) -> Iterator[int]:
    """Slots of the same type and kind that lie otherwise; one for each layout."""
    known = part.slots[slot]
    seen: set[Layouts] = set()
    for other, like in enumerate(part.slots):
        same = like.type == known.type and like.kind == known.kind and other not in read
        unlike = known.cut and like.cut and not _alike(like.cut, known.cut)
        if same and unlike and like.cut not in seen:
            seen.add(like.cut)
            yield other


def _other_layouts(slot: Slot) -> Iterator[Layouts]:
    """Other ways in which a tensor of the same shape could lie along one of its axes."""
    for place, (axis, way) in enumerate(slot.cut):
        for other in _other_ways(way):
            yield (*slot.cut[:place], (axis, other), *slot.cut[place + 1 :])


def _other_ways(way: Any) -> list[Any]:
    if isinstance(way, Split) and way.dim is not None:
        parts = way.blocks if isinstance(way.blocks, int) else len(way.blocks)
        return [
            PARTIAL,
            REPLICATED,
            msgspec.structs.replace(way, dim=way.dim + 1),
            msgspec.structs.replace(way, blocks=parts + 1),
            msgspec.structs.replace(way, turn=way.turn + 1),
            msgspec.structs.replace(way, mirrored=not way.mirrored),
            msgspec.structs.replace(way, order=way.order + 1),
        ]
    if isinstance(way, Split):  # all that is known is that each rank has its own part
        return [PARTIAL, REPLICATED]
    if way == PARTIAL:
        return [REPLICATED, Split(0)]
    return [PARTIAL, Split(0)]


# What runs again


def _again(plan: Plan) -> Iterator[tuple[int, RankClass, int, Any]]:
    for number, part, index, task in each(plan, "run"):
        if task.phase == "R":
            yield number, part, index, task


def _value(slot: Slot) -> str:
    """What a slot has, made first or again."""
    return slot.name.partition(">")[0].removesuffix("~again")


def again_from_another(plan: Plan) -> Iterator[Fault]:
    """Code runs again on a Value, or with keys, of another microbatch or layer, which lies alike."""
    for number, part, index, task in _again(plan):
        for slot in dict.fromkeys(task.inputs):
            known = part.slots[slot]
            for other, like in enumerate(part.slots):
                same = (like.type, like.kind, like.cut) == (known.type, known.kind, known.cut)
                if same and _value(like) != _value(known) and like.kind != "param":
                    inputs = _swapped(task.inputs, slot, other)
                    changes = changed(plan, number, index, inputs=inputs)
                    yield fault(changes, "again memory events updates", task.name)


def again_by_other_parameters(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in _again(plan):
        for slot in dict.fromkeys(task.inputs):
            known = part.slots[slot]
            for other, like in enumerate(part.slots if known.kind == "param" else ()):
                same = (like.type, like.kind, like.cut) == (known.type, known.kind, known.cut)
                if same and like.source != known.source:
                    inputs = _swapped(task.inputs, slot, other)
                    changes = changed(plan, number, index, inputs=inputs)
                    yield fault(changes, "again events memory gathers updates", task.name)


def again_communicated_from_another(plan: Plan) -> Iterator[Fault]:
    """Communication between pieces that run again starts from another Value that lies alike."""
    for number, part, index, task in _changes(plan):
        known = part.slots[task.source]
        if "~again" not in task.name:
            continue
        readers = [t.name for t in part.tasks if t.kind == "run" and task.target in t.inputs]
        if all(name.startswith("B") for name in readers):
            continue  # only backwards read it, of whose inputs no proof knows where they come from
        for other, like in enumerate(part.slots):
            same = (like.type, like.kind, like.cut) == (known.type, known.kind, known.cut)
            if same and _value(like) != _value(known):
                changes = changed(plan, number, index, source=other)
                yield fault(changes, "again memory events", task.name, *readers)


def again_by_other_counts(plan: Plan) -> Iterator[Fault]:
    """Rows travel again by the counts of another layer or microbatch."""
    for number, part, index, task in each(plan, "all_to_all"):
        if "~again" not in task.name or task.splits == NO_SLOT:
            continue
        readers = [t.name for t in part.tasks if t.kind == "run" and task.target in t.inputs]
        if all(name.startswith("B") for name in readers):
            continue  # as above
        for other, like in enumerate(part.slots):
            if like.kind == part.slots[task.splits].kind and other != task.splits:
                changes = changed(plan, number, index, splits=other)
                yield fault(changes, "again memory events", task.name, *readers)


LAYOUT_FAULTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        over_another_axis, of_another_kind, the_wrong_way_round, left_out, read_in_another_layout,
        made_in_another_layout, communicated_to_another_layout, added_in_another_layout,
        again_from_another, again_by_other_parameters, again_communicated_from_another,
        again_by_other_counts,
    )
}  # fmt: skip
