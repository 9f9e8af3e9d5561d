"""What spans of a plan's tasks are of, and the memory that a plan has alive as they pass."""

from __future__ import annotations

from collections import Counter

import pytest

from piper.check.parties import compressed
from piper.check.peak import peak_of
from piper.observe.timeline import Track
from piper.plan.report.task_labels import ClassLabels
from piper.plan.report.track_memory import fill_memory
from piper.plan.tasks import Comm, Run
from piper.plan.types import Plan, RankClass, bind
from tests.matrix import Cell

CELLS = [
    Cell(3, "1f1b", "sharded", "moe", dp=2),
    Cell(2, "zb_h1", "copied", "recompute", dp=2),
    Cell(0, "dualpipev", "sharded", "dropout", dp=2),
]


def _one_after_another(found: RankClass, plan: Plan, steps: int = 2) -> Track:
    """As if every task took as long as its number."""
    track = Track("class", (0,), ClassLabels(plan, found).of_class)
    time = 1.0
    for _ in range(steps):
        track.begins.append(len(track))
        for index in range(len(found.tasks)):
            track.add(index, time, time, time + index + 1)
            time += index + 1
    fill_memory(plan, found, track)
    return track


def _without_nothing(held: dict[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in held.items() if nbytes}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_labels_say_what_tasks_are(cell: Cell) -> None:
    plan = cell.job().plan
    for found in plan.classes:
        for task, label in zip(found.tasks, ClassLabels(plan, found).of_class, strict=True):
            assert (label.name, label.kind, label.tags) == (task.name, task.kind, task.tags)
            assert label.stream == plan.streams[task.stream].name
            assert label.origin == task.origin
            assert label.phase == (task.phase if isinstance(task, Run) else "")
            assert label.communicates == isinstance(task, Comm)
            assert bool(label.nbytes) == isinstance(task, Comm)
            assert label.receives == (task.kind == "recv")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_all_members_of_a_meeting_and_no_others_have_its_name(cell: Cell) -> None:
    plan = cell.job().plan
    met: Counter[tuple[str, tuple[int, ...]]] = Counter()
    names: dict[str, tuple[int, ...]] = {}
    for found in plan.classes:
        labels = ClassLabels(plan, found)
        for rank in plan.mesh.ranks(found.slice):
            groups = bind(plan, rank).groups
            for task, label in zip(found.tasks, labels.of_rank(rank), strict=True):
                if isinstance(task, Comm):
                    members = groups[task.group]
                    met[label.meeting, members] += 1
                    assert names.setdefault(label.meeting, members) == members
    assert met
    assert all(count == len(members) for (_, members), count in met.items())


def test_ranks_of_a_class_share_what_they_do_not_meet_in() -> None:
    plan = CELLS[0].job().plan
    found = plan.classes[0]
    labels = ClassLabels(plan, found)
    first, second = list(plan.mesh.ranks(found.slice))[:2]
    groups = bind(plan, first).groups
    pairs = zip(labels.of_rank(first), labels.of_rank(second), strict=True)
    for task, (one, other) in zip(found.tasks, pairs, strict=True):
        # Who meet in one group have one label; two groups have two.
        meets = isinstance(task, Comm) and second not in groups[task.group]
        assert (one is other) == (not meets)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_memory_of_tasks_one_after_another_is_that_of_the_checker(cell: Cell) -> None:
    plan = cell.job().plan
    world = compressed(plan)
    for party, found in zip(world.parties, plan.classes, strict=True):
        track, peak = _one_after_another(found, plan), peak_of(world, party)
        times = sorted({time for column in track.memory.values() for time in column.times})
        alive = [{name: column.at(time) for name, column in track.memory.items()} for time in times]
        assert max(sum(held.values()) for held in alive) == peak.total
        assert _without_nothing(peak.by_category) in map(_without_nothing, alive)
        half = len(times) // 2
        assert max(sum(held.values()) for held in alive[half:]) == peak.total  # in step two, too
