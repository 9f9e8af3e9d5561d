"""tensor_layouts: where axes share tensors, every collective and every body has what its layouts say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.errors import PlanError
from piper.ir.layouts import (
    PARTIAL,
    REPLICATED,
    Layouts,
    Routed,
    change_between,
    in_dims_of,
    is_read_as,
    layouts_text,
    shifts_back,
)
from piper.plan.slots import Slot
from piper.plan.tasks import Add, Comm, Run


def tensor_layouts(world: World) -> Iterator[Problem]:
    """Collectives that are not the change between the layouts of what they take and leave, bodies that
    read or make what they were not traced for, gradients that are not summed as they lie."""
    for party in world.distinct:
        if any(slot.cut for slot in party.slots):
            yield from _Lying(world, party).run()


class _Lying:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.mesh = world.plan.mesh
        self.sizes = dict(self.mesh.axes)

    def run(self) -> Iterator[Problem]:
        for slot in self.party.slots:
            if slot.kind == "param" and not self._is_held_so(slot):
                has = layouts_text(self.world.plan.tensors[slot.source].cut) or "whole"
                text = f"{slot.source} is read as {layouts_text(slot.cut)}, but held as {has}"
                yield Problem("layouts", f"{self.party.label}: {text}")
        for index, task in enumerate(self.party.tasks):
            if isinstance(task, Run):
                wrong = self._body(task)
            elif isinstance(task, Comm) and not task.facts.is_message:
                wrong = self._collective(task)
            elif isinstance(task, Add):
                wrong = self._sum(task)
            else:
                wrong = ""
            if wrong:
                text = f"{task.name} {wrong}"
                yield problem(self.world, "layouts", text, (self.party, index))

    def _is_held_so(self, slot: Slot) -> bool:
        """A rank has the part of a parameter that its code reads: other blocks are other elements."""
        held = dict(self.world.plan.tensors[slot.source].cut)
        return all(
            self.sizes[axis] == 1 or way == held.get(axis, REPLICATED) for axis, way in slot.cut
        )

    def _body(self, task: Run) -> str:
        for slots, traced, how in (
            (task.inputs, task.sees, "reads"),
            (task.outputs, task.makes, "makes"),
        ):
            if len(traced) not in (0, len(slots)):
                return f"says of {len(traced)} of {len(slots)} tensors how it {how} them"
            for number, slot in enumerate(map(self.party.slots.__getitem__, slots)):
                wanted = traced[number] if traced else ()
                if not self._alike(slot.cut, wanted):
                    lies = layouts_text(slot.cut) or "nothing"
                    was = layouts_text(wanted) or "nothing"
                    return f"{how} {slot.name}, which is {lies}, but was traced for {was}"
        return ""

    def _alike(self, made: Layouts, read: Layouts) -> bool:
        ways = dict(read)
        return len(made) == len(read) and all(
            axis in ways and (self.sizes[axis] == 1 or is_read_as(way, ways[axis]))
            for axis, way in made
        )

    def _collective(self, task: Comm) -> str:
        source, target = self.party.slots[task.source], self.party.slots[task.target]
        if task.facts.keeps_layout or not (source.cut or target.cut):
            return ""
        made = in_dims_of(target.cut, source.cut, len(target.shape) - len(source.shape))
        try:
            change, axes = change_between(made, target.cut, self.mesh)
        except PlanError as error:
            return f"leads from {source.name} to {target.name}: {error.message}"
        over = self.world.group(task).over
        if any(isinstance(way, Routed) for _, way in (*source.cut, *target.cut)):
            axes = over if {*axes} <= {*over} else axes  # rows also travel along axes of data
        if (change, axes) == (task.comm, over):
            if change == "shift" and task.reverse != shifts_back(made, target.cut):
                return f"shifts {source.name} to {target.name} the wrong way round"
            return ""
        if not change and not {axis for axis, _ in target.cut} & {*over}:
            return ""  # along other axes: other proofs look at it
        wanted = f"{change} over {', '.join(axes)}" if change else "nothing"
        return (
            f"makes {target.name} ({layouts_text(target.cut)}) of {source.name} "
            f"({layouts_text(source.cut)}), for which it takes {wanted}"
        )

    def _sum(self, task: Add) -> str:
        bucket = self.party.slots[task.sums[0]].bucket
        for number, term in enumerate(map(self.party.slots.__getitem__, task.terms)):
            if bucket >= 0:
                wrong = self._gradient(term, bucket)
            else:
                total = self.party.slots[task.sums[number if len(task.sums) > 1 else 0]]
                wrong = "" if self._alike(term.cut, total.cut) else self._term(term, total)
            if wrong:
                return wrong
        return ""

    def _term(self, term: Slot, total: Slot) -> str:
        lies = f"{layouts_text(term.cut) or 'nothing'}, to {total.name}, which is "
        return f"adds {term.name}, which is {lies}{layouts_text(total.cut) or 'nothing'}"

    def _gradient(self, term: Slot, number: int) -> str:
        """A parameter's gradient is summed over the axes along which it is partial, and no others."""
        bucket = self.world.plan.buckets[number]
        summed = {*bucket.over, *bucket.copies}
        own = self._params.get(term.source, ())
        if term.source and {axis for axis, _ in term.cut} != {axis for axis, _ in own}:
            return f"adds {term.name}, which does not say how it lies where {term.source} does"
        for axis, way in term.cut:
            if self.sizes[axis] > 1 and not (
                axis in summed
                if way == PARTIAL
                else axis in bucket.same
                if way == REPLICATED
                else (axis, way) in own
            ):
                over = ", ".join(sorted(summed)) or "nothing"
                return f"adds {term.name}, which is {axis}: {way}, to a sum over {over}"
        return ""

    @cached_property
    def _params(self) -> dict[str, Layouts]:
        """How each parameter lies."""
        return {slot.source: slot.cut for slot in self.party.slots if slot.kind == "param"}
