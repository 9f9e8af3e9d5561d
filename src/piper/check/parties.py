"""Parties: a plan in, who takes part out: one party per class of ranks, or one per rank.

All ranks of a class do the same at the same time, so that a proof over classes holds for all ranks: a
group over axes within a class is one party that meets itself. Expanding is for faults of single ranks
and for testing that both forms agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from piper.directives.split import Split
from piper.mesh import Group, Slice
from piper.plan.local_order import Local
from piper.plan.slots import Slot
from piper.plan.tasks import Meeting, Task
from piper.plan.types import Bucket, Plan, bind

Members = tuple[int, ...]  # numbers of parties, ascending


@dataclass(frozen=True, eq=False)
class Party:
    """Who dispatches one list of tasks; `groups` has the parties of every group that it names."""

    number: int
    label: str
    slice: Slice
    num_ranks: int
    tasks: tuple[Task, ...]
    slots: tuple[Slot, ...]
    results: dict[str, int]
    groups: dict[int, Members]


@dataclass(frozen=True, eq=False)
class World:
    """All parties of a plan. Parties that share their tasks share what is found out about them."""

    plan: Plan
    parties: tuple[Party, ...]
    by_rank: bool
    _local: dict[tuple[int, int], Local] = field(default_factory=dict)
    _groups: dict[int, Group] = field(default_factory=dict)

    def local(self, party: Party) -> Local:
        key = (id(party.tasks), id(party.slots))
        if key not in self._local:
            self._local[key] = Local(party.tasks, party.slots)
        return self._local[key]

    @property
    def distinct(self) -> list[Party]:
        """One party of all that do the same."""
        found = {(id(p.tasks), id(p.slots), p.slice): p for p in reversed(self.parties)}
        return sorted(found.values(), key=lambda party: party.number)

    def group(self, task: Meeting) -> Group:
        """The group of a task with slices and axes in one order, without axes of one rank."""
        if task.group not in self._groups:
            self._groups[task.group] = normal(self.plan, self.plan.groups[task.group])
        return self._groups[task.group]

    def size(self, task: Meeting) -> int:
        return self.plan.groups[task.group].size(self.plan.mesh)

    def communicator(self, party: Party, task: Meeting) -> tuple[Members, tuple[str, ...], int]:
        """Who meets in a collective: its members and stream, and for classes along which axes."""
        over = () if self.by_rank else self.group(task).over
        return party.groups[task.group], over, task.stream

    @cached_property
    def split_tags(self) -> tuple[str, ...]:
        """Whose values number a microbatch, in the order of the directives that gave them."""
        records = (record.directive for record in self.plan.history)
        return tuple(split.tag for split in records if isinstance(split, Split))

    @property
    def everything(self) -> Group:
        """All ranks that share the batch, of all slices."""
        slices = tuple(part.slice for part in self.plan.classes)
        return normal(self.plan, Group(slices, self.plan.data_axes))

    @property
    def all_ranks(self) -> Group:
        """All ranks of all slices."""
        slices = tuple(part.slice for part in self.plan.classes)
        return normal(self.plan, Group(slices, self.plan.mesh.free(slices[0])))

    def trained_at(self, at: Slice) -> list[tuple[int, Bucket]]:
        """The buckets of a slice that are updated."""
        found = enumerate(self.plan.buckets)
        return [(n, b) for n, b in found if at in b.slices and b.trained and self.plan.train]


def normal(plan: Plan, group: Group) -> Group:
    sizes = dict(plan.mesh.axes)
    over = tuple(a for a in plan.mesh.names if a in group.over and sizes[a] > 1)
    return Group(tuple(sorted(group.slices)), over)


def compressed(plan: Plan) -> World:
    """One party per class."""
    number = {found.slice: index for index, found in enumerate(plan.classes)}
    parties = []
    for index, found in enumerate(plan.classes):
        named = {task.group for task in found.tasks if isinstance(task, Meeting)}
        used = {group for group in named if 0 <= group < len(plan.groups)}
        groups = {
            g: tuple(sorted(number[at] for at in plan.groups[g].slices if at in number))
            for g in sorted(used)
        }
        num_ranks = plan.mesh.size_of(plan.mesh.free(found.slice))
        parties.append(
            Party(
                index,
                str(found.slice),
                found.slice,
                num_ranks,
                found.tasks,
                found.slots,
                found.results,
                groups,
            )
        )
    return World(plan, tuple(parties), by_rank=False)


def expanded(plan: Plan) -> World:
    """One party per rank."""
    parties = []
    for found in plan.classes:
        for rank in plan.mesh.ranks(found.slice):
            mine = bind(plan, rank)
            parties.append(
                Party(
                    rank,
                    f"rank {rank}",
                    found.slice,
                    1,
                    mine.tasks,
                    mine.slots,
                    mine.results,
                    mine.groups,
                )
            )
    return World(plan, tuple(sorted(parties, key=lambda p: p.number)), by_rank=True)
