"""cadences: gradients are reduced as often as was asked, so that no sum is whole for longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.ir.nodes import ONCE, TRACED
from piper.plan.cadence import asked_for, every
from piper.plan.slots import SUMS
from piper.plan.tasks import Add, Comm, microbatch_of, scatters


def cadences(world: World) -> Iterator[Problem]:
    """Reductions of a bucket that take more or fewer microbatches than was asked."""
    for party in world.distinct:
        yield from _Cadences(world, party).run()


class _Cadences:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.chosen = {cadence.origin: cadence for cadence in world.plan.cadences}
        # Sum -> microbatches that are in it.
        self.summed: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        # Per bucket, its reductions, and how many microbatches each takes.
        self.reduced: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def run(self) -> Iterator[Problem]:
        for index, task in enumerate(self.party.tasks):
            if isinstance(task, Add):
                self._add(task)
            elif scatters(task) and self.party.slots[task.source].bucket >= 0:
                bucket = self.party.slots[task.source].bucket
                taken = self.summed.pop(task.source, set())
                self.reduced[bucket].append((index, len(taken)))
        for found in self.reduced.values():
            yield from self._bucket(found)

    def _add(self, task: Add) -> None:
        """What is cast for the wire has the microbatches of its sum."""
        number = microbatch_of(task, self.world.split_tags)
        cast = [self.summed[slot] for slot in task.terms if slot in self.summed]
        for total in task.sums:
            if self.party.slots[total].kind in SUMS:
                self.summed[total] |= cast[0] if cast else {number}

    def _bucket(self, found: list[tuple[int, int]]) -> Iterator[Problem]:
        """Each takes as many microbatches as was asked, but for one that takes the rest."""
        total = sum(taken for _, taken in found)
        for index, taken in found:
            task = self.party.tasks[index]
            assert isinstance(task, Comm)
            asked = self._asked(task) or max(1, total)
            fewer = sum(number < asked for _, number in found)
            if taken > asked or (taken < asked and fewer > 1):
                text = (
                    f"{task.name} reduces {taken} microbatches of {total}, as one of {len(found)}"
                )
                text += f" reductions; {every(self._asked(task))} was asked"
                yield self._problem(text, index)

    def _asked(self, task: Comm) -> int:
        if task.origin == TRACED:
            return ONCE
        directive = self.world.plan.history[task.origin].directive
        return asked_for(directive, self.chosen, task.origin)[0]

    def _problem(self, text: str, index: int) -> Problem:
        return problem(self.world, "updates", text, (self.party, index))
