"""gathers: parameters that are gathered for each use are there when read, and no longer or earlier.

A gathered bucket is freed by its last reader; at most `reuse` chunks share it; and its gather starts
only when all but `prefetch` of the chunks before its first reader are complete, as its directive says.
Chunks count, not microbatches: several chunks of one microbatch may read a bucket, and each holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World, normal
from piper.check.problem import Problem, problem
from piper.ir.nodes import ONCE, TRACED
from piper.mesh import Group
from piper.plan.cadence import asked_for
from piper.plan.tasks import Run, Task
from piper.plan.tasks import gathers as filled_by


def gathers(world: World) -> Iterator[Problem]:
    """Missing gathers, and gathered parameters that are kept too long or made too early."""
    for party in world.distinct:
        if any(slot.kind == "gathered" for slot in party.slots):
            yield from _Gathers(world, party).run()


class _Gathers:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.local = world.local(party)
        self.gather: dict[int, int] = {}  # gathered slot -> the task that filled it
        self.users: dict[int, list[int]] = {}  # and those that have read it since
        runs = [i for i, task in enumerate(party.tasks) if isinstance(task, Run)]
        self.run_number = {task: number for number, task in enumerate(runs)}
        self.runs = runs
        self.chosen = {cadence.origin: cadence for cadence in world.plan.cadences}

    def run(self) -> Iterator[Problem]:
        for index, task in enumerate(self.party.tasks):
            for slot in self._gathered(task.reads):
                if slot in self.gather:
                    self.users[slot].append(index)
                else:
                    text = f"{task.name} reads {self._name(slot)}, which no gather has filled"
                    yield self._problem(f"{text}: missing gather", index)
            for slot in self._gathered(task.writes):
                if slot in self.gather:
                    yield from self._end(slot, -1)
                yield from self._begin(index, task, slot)
            for slot in self._gathered(task.frees):
                if slot in self.gather:
                    yield from self._end(slot, index)
        for slot in list(self.gather):
            yield from self._end(slot, -1)

    def _gathered(self, slots: tuple[int, ...]) -> list[int]:
        roots = dict.fromkeys(self.local.root[slot] for slot in slots)
        return [root for root in roots if self.party.slots[root].kind == "gathered"]

    def _begin(self, index: int, task: Task, slot: int) -> Iterator[Problem]:
        self.gather[slot], self.users[slot] = index, []
        number = self.party.slots[slot].bucket
        over = self.world.plan.buckets[number].over
        group = normal(self.world.plan, Group((self.party.slice,), over))
        right = False
        if filled_by(task):
            shard = self.party.slots[task.source]
            right = (shard.kind, shard.bucket) == ("shard", number)
            right &= self.world.group(task) == group
        if not right:
            text = f"{task.name} fills {self._name(slot)} not from its shards on {group}"
            yield self._problem(text, index)

    def _end(self, slot: int, freed: int) -> Iterator[Problem]:
        """A gathered bucket is gone: who had it, and for how long?"""
        begin, users = self.gather.pop(slot), self.users.pop(slot)
        known = self.party.slots[slot]
        by = self.party.tasks[begin].name
        if not users:
            yield self._problem(f"{by} gathers what nobody reads", begin)
            return
        if freed != users[-1]:
            text = f"{known.name} is kept too long: its last reader is "
            text += self.party.tasks[users[-1]].name
            until = "it is never freed" if freed < 0 else f"{self.party.tasks[freed].name} frees it"
            tasks = [users[-1]] if freed < 0 else [users[-1], freed]
            yield self._problem(f"{text}, {until}", begin, *tasks)
        uses, ahead = self._asked(begin, known.bucket)
        if uses != ONCE and len(users) > uses:
            text = f"{known.name} is kept too long: {len(users)} chunks share it, of {uses}"
            yield self._problem(text, begin, *users)
        early = self._runs_between(begin, users[0])
        if early > ahead:
            text = f"{by} may start {early} chunks before its first reader, of {ahead}"
            yield self._problem(text, begin, users[0])

    def _asked(self, gather: int, bucket: int) -> tuple[int, int]:
        """How many chunks may share a gather, and how early it may start, by its directive."""
        origin = self.party.tasks[gather].origin
        if origin == TRACED:
            return 1, 1
        directive = self.world.plan.history[origin].directive
        _, uses = asked_for(directive, self.chosen, origin, bucket)
        return uses, getattr(directive, "prefetch", 1)

    def _runs_between(self, gather: int, user: int) -> int:
        """Chunks before a reader that need not be complete when its gather starts."""
        number = self.run_number.get(user, 0)
        for earlier in range(number - 1, -1, -1):
            if self.local.ordered(self.runs[earlier], gather):
                return number - 1 - earlier
        return number

    def _name(self, slot: int) -> str:
        return self.party.slots[slot].name

    def _problem(self, text: str, *tasks: int) -> Problem:
        return problem(self.world, "gathers", text, *((self.party, t) for t in tasks))
