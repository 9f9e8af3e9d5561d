"""Traffic: a plan in; the bytes that pass between every two ranks in a step, by kind, and a table of who
talks in which group, out.

A message takes its bytes from one rank to another. What a rank's link carries in a collective
(`ir/communication.py`) is spread evenly over the other members; in a directed one all of it goes on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import msgspec

from piper.plan.report.explain import group_text
from piper.plan.tasks import Comm
from piper.plan.types import Plan, RankClass
from piper.view.columns import Columns, Ref

MOST_RANKS = 256  # beyond, a place of the matrix is a class


class Talk(msgspec.Struct, frozen=True):
    """What a class says in one group, on one stream: per rank how many times, and the bytes that its
    link carries out."""

    at: str
    kind: str
    stream: str
    group: str
    members: int
    messages: int
    nbytes: float


class Matrix(msgspec.Struct, frozen=True):
    """`nbytes` of a kind go from a place to another; a place is a rank, or a class of ranks."""

    places: list[str]
    by_class: bool
    kinds: list[str]
    kind: Ref
    source: Ref
    target: Ref
    nbytes: Ref
    talks: list[Talk]


class _Way(NamedTuple):
    group: int
    kind: str
    stream: int
    reverse: bool


def matrix(columns: Columns, plan: Plan) -> Matrix:
    by_class = plan.mesh.size > MOST_RANKS
    class_at = {str(found.slice): number for number, found in enumerate(plan.classes)}
    places = list(class_at) if by_class else [str(rank) for rank in range(plan.mesh.size)]
    cells: dict[tuple[str, int, int], float] = defaultdict(float)
    talks: list[Talk] = []
    homes = _homes(plan) if by_class else {}
    for found in plan.classes:
        for way, (messages, carried, first) in _ways(plan, found).items():
            if not carried:
                continue
            talks.append(_talk(plan, found, way, messages, carried, first))
            ranks = list(plan.mesh.ranks(found.slice))
            for rank in ranks[:1] if by_class else ranks:  # all ranks of a class talk alike
                for peer, nbytes in _spread(plan, rank, way, carried, first):
                    if by_class:
                        cells[way.kind, homes[rank], homes[peer]] += nbytes * len(ranks)
                    else:
                        cells[way.kind, rank, peer] += nbytes
    kinds = sorted({kind for kind, _, _ in cells})
    rows = sorted(cells.items())
    return Matrix(
        places,
        by_class,
        kinds,
        columns.counts([kinds.index(kind) for (kind, _, _), _ in rows]),
        columns.counts([source for (_, source, _), _ in rows]),
        columns.counts([target for (_, _, target), _ in rows]),
        columns.column("d", (nbytes for _, nbytes in rows)),
        sorted(talks, key=lambda talk: -talk.nbytes),
    )


def _homes(plan: Plan) -> dict[int, int]:
    """The class of each rank."""
    return {
        rank: number
        for number, found in enumerate(plan.classes)
        for rank in plan.mesh.ranks(found.slice)
    }


def _ways(plan: Plan, found: RankClass) -> dict[_Way, tuple[int, float, Comm]]:
    """How often a rank talks in each way, the bytes that its link carries out, and one such task."""
    ways: dict[_Way, tuple[int, float, Comm]] = {}
    for task in found.tasks:
        if not isinstance(task, Comm) or not task.facts.brings:
            continue
        way = _Way(task.group, task.comm, task.stream, task.reverse and task.facts.directed)
        members = plan.groups[task.group].size(plan.mesh)
        brought = found.slots[task.source].type.nbytes
        carried = float(brought) if task.facts.is_message else task.facts.carries(brought, members)
        messages, before, first = ways.get(way, (0, 0.0, task))
        ways[way] = messages + 1, before + carried, first
    return ways


def _talk(
    plan: Plan, found: RankClass, way: _Way, messages: int, carried: float, task: Comm
) -> Talk:
    group = plan.groups[way.group]
    return Talk(
        str(found.slice),
        way.kind,
        plan.streams[way.stream].name,
        group_text(plan, found, task),
        group.size(plan.mesh),
        messages,
        carried,
    )


def _spread(
    plan: Plan, rank: int, way: _Way, carried: float, task: Comm
) -> list[tuple[int, float]]:
    members = plan.groups[way.group].ranks(plan.mesh, rank)
    others = [member for member in members if member != rank]
    if not others:
        return []
    if task.facts.directed:
        at = members.index(rank) + (-1 if way.reverse else 1)
        return [(members[at % len(members)], carried)]
    return [(other, carried / len(others)) for other in others]
