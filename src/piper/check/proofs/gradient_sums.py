"""sums: a sum is started once, contains all that was added to it, and is used."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.tasks import Add, Task


def sums(world: World) -> Iterator[Problem]:
    """Sums that go on from an earlier step, start again before they are used, or are not used."""
    for party in world.distinct:
        yield from _Sums(world, party).run()


class _Sums:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.begun: dict[int, set[int]] = {}  # sum -> offsets of the parts that are started
        self.zeroed: set[int] = set()
        self.made: dict[int, int] = {}  # contribution -> the task that made it, until it is read
        self.unused: dict[int, int] = {}  # sum -> its last add that nobody has read yet

    def run(self) -> Iterator[Problem]:
        kept = set(self.party.results.values())
        for index, task in enumerate(self.party.tasks):
            if isinstance(task, Add):
                yield from self._add(index, task)
            else:
                self.made.update((slot, index) for slot in task.writes if self._contributes(slot))
            for slot in task.reads:
                adds = isinstance(task, Add) and self._contributes(slot)
                if adds and self.made.pop(slot, None) is None:
                    text = f"{task.name} adds {self._name(slot)}, which is added already"
                    yield self._problem(text, index)
                if slot in self.begun:
                    yield from self._use(index, task, slot)
            for slot in task.frees:
                if slot in self.unused:
                    yield self._lost(slot)
                self.begun.pop(slot, None)
                self.zeroed.discard(slot)
        for slot in list(self.unused):
            if slot not in kept:
                yield self._lost(slot)
        for slot, index in self.made.items():
            text = f"{self._name(slot)}, which {self.party.tasks[index].name} makes, is not added"
            yield self._problem(text, index)

    def _contributes(self, slot: int) -> bool:
        """Whether a slot holds a contribution to the gradient of a parameter."""
        found = self.party.slots[slot]
        return found.kind == "temp" and (bool(found.source) or found.bucket >= 0)

    def _add(self, index: int, task: Add) -> Iterator[Problem]:
        if task.zeros:
            yield from self._start(index, task, task.sums[0], None)
        for slot, offset, first in task.parts:
            if first:
                yield from self._start(index, task, slot, offset)
            elif slot not in self.zeroed and offset not in self.begun.get(slot, ()):
                text = f"{task.name} adds to {self._name(slot)}, which no task has started"
                yield self._problem(text, index)
        for slot in task.sums:
            self.unused[slot] = index

    def _start(self, index: int, task: Task, slot: int, offset: int | None) -> Iterator[Problem]:
        parts = self.begun.setdefault(slot, set())
        earlier = self.unused.get(slot, index)
        again = parts if offset is None else offset in parts
        if again and earlier != index:
            text = f"{task.name} starts {self._name(slot)} again and loses what was added"
            yield self._problem(text, index, earlier)
        if slot not in self.unused:  # used, so that this is another sum in the same place
            parts.clear()
            self.zeroed.discard(slot)
            self.unused[slot] = index
        if offset is None:
            self.zeroed.add(slot)
        else:
            parts.add(offset)

    def _use(self, index: int, task: Task, slot: int) -> Iterator[Problem]:
        self.unused.pop(slot, None)
        number = self.party.slots[slot].bucket
        if number < 0 or slot in self.zeroed or self.begun[slot] == {0}:
            return
        bucket = self.world.plan.buckets[number]
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            if offset not in self.begun[slot]:
                text = f"{task.name} reads {self._name(slot)}, in which {name} is not started"
                yield self._problem(text, index)

    def _lost(self, slot: int) -> Problem:
        index = self.unused.pop(slot)
        task = self.party.tasks[index]
        return self._problem(f"{task.name}: what it adds to {self._name(slot)} is lost", index)

    def _name(self, slot: int) -> str:
        return self.party.slots[slot].name

    def _problem(self, text: str, *tasks: int) -> Problem:
        return problem(self.world, "updates", text, *((self.party, t) for t in tasks))
