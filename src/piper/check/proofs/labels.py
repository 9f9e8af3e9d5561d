"""labels: tags and phases of tasks, by which people and reports find them, say what the tasks do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.ir.nodes import Tags, label
from piper.plan.slots import SUMS
from piper.plan.tasks import Run, Task, sends

_PART = re.compile(r"\.\d+")  # of a region that was cut into several chunks
_TIES = ("temp", *SUMS, "gathered", "host")  # kinds of slots that tie tasks of one step together


def labels(world: World) -> Iterator[Problem]:
    """Chunks whose name is another than their phase and tags say, and tasks whose tags no task has that
    they take from or give to."""
    for party in world.distinct:
        yield from _Labels(world, party).run()


class _Labels:
    def __init__(self, world: World, party: Party) -> None:
        self.world = world
        self.party = party
        self.root = world.local(party).root
        self.tying = [slot.kind in _TIES for slot in party.slots]
        self.sums = [slot.kind in SUMS for slot in party.slots]
        self.writer: dict[int, Tags] = {}  # slot -> tags of who writes it
        self.reader: dict[int, Tags] = {}  # slot -> tags of who reads it first
        self.to_chunk: set[int] = set()  # slots that a chunk reads first
        for task in party.tasks:
            tags = task.tags
            for slot in task.reads:
                if self.root[slot] not in self.reader and isinstance(task, Run):
                    self.to_chunk.add(self.root[slot])
                self.reader.setdefault(self.root[slot], tags)
            for slot in task.writes:
                self.writer[slot] = tags

    def run(self) -> Iterator[Problem]:
        for index, task in enumerate(self.party.tasks):
            if isinstance(task, Run):
                wanted = label(task.phase, task.tags)
                if task.name != wanted and _PART.sub("", task.name).replace("[,", "[") != wanted:
                    yield self._problem(f"{task.name} has the phase and tags of {wanted}", index)
            elif not sends(task) and not self._tied(task):  # a send has the tags of its recv
                tags = ",".join(f"{tag}={value}" for tag, value in task.tags) or "none"
                text = f"{task.name} has tags ({tags}) of no task that it works for"
                yield self._problem(text, index)

    def _tied(self, task: Task) -> bool:
        near: list[Tags] = []  # of tasks that take from it or give to it
        sums: list[Tags] = []  # of those that do so by a sum that may outlast microbatches
        for slots, others in ((task.reads, self.writer), (task.writes, self.reader)):
            for slot in slots:
                if self.tying[slot] and slot in others:
                    lasts = self.sums[slot] and slot not in self.to_chunk
                    (sums if lasts else near).append(others[slot])
        return task.tags in near or (task.tags in sums if task.tags else not near)

    def _problem(self, text: str, index: int) -> Problem:
        return problem(self.world, "labels", text, (self.party, index))
