"""memory: in dispatch order every slot is written, then read, then freed once in each step.

What stays from step to step is there when a step begins, and a step leaves nothing else behind; so
what holds for one step holds for the next.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.slots import FILLED, LINGERING, STAYING
from piper.plan.tasks import Add, Task

_AFTERWARDS = STAYING | LINGERING | {"gathered"}  # what may be there when the last task has ended


def memory(world: World) -> Iterator[Problem]:
    """Reads of what is not there, early reuse, double frees and leaks."""
    for party in world.distinct:
        yield from _Slots(world, party).run()


class _Slots:
    """The state of a party's slots while its tasks pass."""

    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.root = world.local(party).root
        self.kind = [party.slots[r].kind for r in self.root]
        self.there = [party.slots[r].kind in FILLED for r in self.root]
        self.freed: dict[int, int] = {}  # slot -> the task that freed it
        self.touched: dict[int, int] = {}  # slot -> the last task that used it

    def run(self) -> Iterator[Problem]:
        for index, task in enumerate(self.party.tasks):
            yield from self._reads(index, task)
            yield from self._writes(index, task)
            yield from self._frees(index, task)
        kept = set(self.party.results.values())
        for slot, there in enumerate(self.there):
            kind = self.kind[slot]
            passing = kind not in _AFTERWARDS and slot not in kept
            if there and passing and self.root[slot] == slot and slot in self.touched:
                yield self._problem(f"{self._name(slot)} is never freed", self.touched[slot])
        for name, slot in self.party.results.items():
            if not self.there[self.root[slot]]:
                text = f"{self.party.label}: the result {name} is not there when a step ends"
                yield self._problem(text, *([self.freed[slot]] if slot in self.freed else ()))

    def _reads(self, index: int, task: Task) -> Iterator[Problem]:
        for slot in dict.fromkeys((*task.reads, *_continued(task))):
            root = self.root[slot]
            self.touched[root] = index
            if self.there[root] or self.kind[slot] == "gathered":  # see the proof `gathers`
                continue
            if root in self.freed:
                text = f"{task.name} reads {self._name(slot)}, which is already freed"
                yield self._problem(text, index, self.freed[root])
            else:
                text = f"{task.name} reads {self._name(slot)}, which nobody has written yet"
                yield self._problem(text, index, *self._writer_after(index, root))

    def _writes(self, index: int, task: Task) -> Iterator[Problem]:
        for slot in task.writes:
            root = self.root[slot]
            reused = self.there[root] and root == slot and self.kind[slot] not in STAYING
            if reused and slot not in task.reads and not isinstance(task, Add):
                text = f"{task.name} overwrites {self._name(slot)}, which is still in use"
                yield self._problem(text, index, self.touched.get(root, index))
            self.there[root] = True
            self.freed.pop(root, None)
            self.touched[root] = index

    def _frees(self, index: int, task: Task) -> Iterator[Problem]:
        for slot in task.frees:
            root, name = self.root[slot], self._name(slot)
            if self.kind[slot] in STAYING | LINGERING:
                yield self._problem(f"{task.name} frees {name}, which stays", index)
            elif slot != root:
                text = f"{task.name} frees {name}, which is a part of {self._name(root)}"
                yield self._problem(text, index)
            elif root in self.freed:
                text = f"{task.name} frees {name}, which is already freed"
                yield self._problem(text, index, self.freed[root])
            elif not self.there[root]:
                text = f"{task.name} frees {name}, which nobody has written yet"
                yield self._problem(text, index)
            else:
                self.there[root] = False
                self.freed[root] = index

    def _writer_after(self, index: int, root: int) -> list[int]:
        """The task that writes a slot too late."""
        for later in range(index + 1, len(self.party.tasks)):
            if any(self.root[s] == root for s in self.party.tasks[later].writes):
                return [later]
        return []

    def _name(self, slot: int) -> str:
        return self.party.slots[slot].name

    def _problem(self, text: str, *tasks: int) -> Problem:
        return problem(self.world, "memory", text, *((self.party, t) for t in tasks))


def _continued(task: Task) -> tuple[int, ...]:
    """Sums that a task adds to without starting them."""
    if not isinstance(task, Add) or task.zeros or all(task.first):
        return ()
    if len(task.sums) == len(task.terms):
        return tuple(s for s, first in zip(task.sums, task.first, strict=True) if not first)
    return task.sums
