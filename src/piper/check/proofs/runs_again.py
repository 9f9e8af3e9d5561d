"""runs_again: code that runs again for a backward is given what its forward was given."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.tasks import Comm, Run


def runs_again(world: World) -> Iterator[Problem]:
    """What runs again but never ran, makes less than its forward, or reads something else: neither what
    that has read nor what the same communication makes of the same."""
    for party in world.distinct:
        if any(isinstance(task, Run) and task.phase == "R" for task in party.tasks):
            yield from _Again(world, party).run()


class _Again:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.first: dict[int, int] = {}  # what was made again -> what was made first
        self.known: dict[int, Hashable] = {}
        self.numbers: dict[Hashable, int] = {}  # of what communication makes

    @cached_property
    def comms(self) -> dict[int, Comm]:
        """Slot -> the collective that makes it."""
        tasks = (task for task in self.party.tasks if isinstance(task, Comm))
        found = {task.target: task for task in tasks if not task.facts.is_message}
        return {slot: task for slot, task in found.items() if task.source != slot}

    def run(self) -> Iterator[Problem]:
        forwards = {
            task.name: task
            for task in self.party.tasks
            if isinstance(task, Run) and task.phase == "F"
        }
        for index, task in enumerate(self.party.tasks):
            if isinstance(task, Run) and task.phase == "R":
                forward = forwards.get(f"F{task.name.removeprefix('R')}")
                wrong = self._differs(task, forward)
                if wrong:
                    text = f"{task.name} {wrong}"
                    yield problem(self.world, "again", text, (self.party, index))

    def _differs(self, task: Run, forward: Run | None) -> str:
        if forward is None:
            return "runs again, but never ran"
        if len(task.outputs) < len(forward.outputs):
            return f"makes less than {forward.name} has made"
        self.first |= dict(zip(task.outputs, forward.outputs, strict=False))
        given = iter(task.inputs)  # what is saved may need more inputs than results do
        for slot in forward.inputs:
            wanted = self._made(slot)
            if all(self._made(other) != wanted for other in given):
                return (
                    f"does not read what {forward.name} has read as {self.party.slots[slot].name}"
                )
        return ""

    def _made(self, slot: int) -> Hashable:
        """What a slot has, whichever slot that is: the same for equal communication of the same."""
        path: list[tuple[int, Hashable]] = []
        while slot not in self.known:
            found, comm = self.party.slots[slot], self.comms.get(slot)
            self.known[slot] = found.source if found.kind == "param" else slot
            if found.kind == "param":
                break
            if slot in self.first:
                path.append((slot, None))
                slot = self.first[slot]
            elif comm is not None:
                path.append((slot, (comm.comm, comm.group, comm.reverse, comm.splits)))
                slot = comm.source
            else:
                break
        made = self.known[slot]
        for each, how in reversed(path):
            if how is not None:
                made = "made", self.numbers.setdefault((how, made), len(self.numbers))
            self.known[each] = made
        return made
