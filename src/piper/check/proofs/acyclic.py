"""acyclic: nobody waits in a circle: all ranks' tasks of a step have one common order.

Nodes are tasks; the members of a collective are one node, and so are a send and its recv: some
transports hold a send back until its peer receives. A task comes after the one before it on its stream,
what it waits for, and the last host read before it, which held its dispatch back.

One step is enough for two: a rank ends a step before it begins the next, and by the proofs `messages`
and `collectives` what is sent and joined in a step is received and met in it; so a step's order,
twice, is an order of two steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem, task_line
from piper.check.proofs.collectives import communicators
from piper.check.proofs.messages import channels

At = tuple[Party, int]


def acyclic(world: World) -> Iterator[Problem]:
    """Waits for tasks that are dispatched later, and a circle of waits if there is one."""
    for party in world.distinct:
        for index, task in enumerate(party.tasks):
            for wait in task.waits:
                if wait >= index:
                    text = f"{task.name} waits for {party.tasks[wait].name}, dispatched after it"
                    yield problem(world, "acyclic", text, (party, index), (party, wait))
    circle = _Waiting(world).circle()
    if circle:
        names = tuple(at[0].tasks[at[1]].name for at, _ in circle)
        witness = tuple(
            task_line(world, *at, why=f"waits for {why}{_meets(why, nxt)}")
            for (at, why), (nxt, _) in zip(circle, (*circle[1:], circle[0]), strict=True)
        )
        yield Problem("acyclic", "ranks wait for each other in a circle", names, witness)


def _meets(awaited: str, peer: At) -> str:
    """What a task waits for may be over only together with another rank's task."""
    name = peer[0].tasks[peer[1]].name
    return "" if awaited.endswith(f" {name}") else f", which meets {name}"


class _Waiting:
    """Who waits for whom, in one step of all parties."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.offset: dict[int, int] = {}
        self.tasks: list[At] = []
        for party in world.parties:
            self.offset[party.number] = len(self.tasks)
            self.tasks += [(party, index) for index in range(len(party.tasks))]
        self.node = list(range(len(self.tasks)))  # task -> the first of those it meets, or itself
        self.members: dict[int, list[int]] = {}
        self._join_collectives()
        self._join_messages()
        self.before = self._before()

    def _join_collectives(self) -> None:
        for joined in communicators(self.world).values():
            lists = [[self.offset[n] + i for i in indices] for n, indices in joined.items()]
            for round_ in zip(*lists, strict=False):
                self._join(list(round_))

    def _join_messages(self) -> None:
        sent, received, _ = channels(self.world)
        for channel, sends in sent.items():
            for pair in zip(sends, received.get(channel, ()), strict=False):
                self._join([self.offset[party.number] + index for party, index in pair])

    def _join(self, tasks: list[int]) -> None:
        if len(tasks) > 1:
            self.members[tasks[0]] = tasks
            for task in tasks:
                self.node[task] = tasks[0]

    def _before(self) -> list[list[int]]:
        """Per task, the tasks that it comes after."""
        found: list[list[int]] = []
        for party in self.world.parties:
            offset = self.offset[party.number]
            last: dict[int, int] = {}  # stream -> its last task so far
            read = -1
            for index, task in enumerate(party.tasks):
                previous = last.get(task.stream, -1)
                after = [offset + wait for wait in task.waits]
                if previous >= 0:
                    after.append(offset + previous)
                if read > previous:
                    after.append(offset + read)
                found.append(after)
                last[task.stream] = index
                if task.blocks:
                    read = index
        return found

    def circle(self) -> list[tuple[At, str]]:
        """Tasks that wait for each other, each with how it waits for the next; [] if none do."""
        stuck = self._stuck()
        if not stuck:
            return []
        # The choice by name makes ranks of a class show the circle of their class.
        task = min(stuck, key=lambda t: (self._name(t), t))
        path: list[tuple[int, str]] = []
        seen: dict[int, int] = {}
        while self.node[task] not in seen:
            seen[self.node[task]] = len(path)
            waiting, task = min(
                (
                    (member, after)
                    for member in self.members.get(self.node[task], [task])
                    for after in self.before[member]
                    if self.node[after] in stuck
                ),
                key=lambda pair: (self._name(pair[1]), self._name(pair[0]), pair),
            )
            path.append((waiting, self._why(waiting, task)))
        found = path[seen[self.node[task]] :]
        return [(self.tasks[t], why) for t, why in found]

    def _stuck(self) -> set[int]:
        """Nodes that can never start."""
        node, before = self.node, self.before
        following: list[list[int]] = [[] for _ in self.tasks]
        missing = [0] * len(self.tasks)
        for task, tasks in enumerate(before):
            mine = node[task]
            for after in tasks:
                following[node[after]].append(mine)
                missing[mine] += 1
        ready = [t for t in range(len(self.tasks)) if node[t] == t and not missing[t]]
        num_left = sum(1 for t in range(len(self.tasks)) if node[t] == t)
        while ready:
            task = ready.pop()
            num_left -= 1
            for target in following[task]:
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
        if not num_left:
            return set()
        return {t for t in range(len(self.tasks)) if node[t] == t and missing[t]}

    def _name(self, task: int) -> str:
        party, index = self.tasks[task]
        return party.tasks[index].name

    def _why(self, task: int, after: int) -> str:
        (party, index), (other, earlier) = self.tasks[task], self.tasks[after]
        if earlier in party.tasks[index].waits:
            return f"the event of {other.tasks[earlier].name}"
        if party.tasks[index].stream == other.tasks[earlier].stream:
            return f"its stream's {other.tasks[earlier].name}"
        return f"the host read {other.tasks[earlier].name}"
