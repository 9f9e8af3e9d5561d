"""Timeline classes: a plan and a timeline of it in, the class of each track out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from piper.errors import PlanError
from piper.observe.timeline import Timeline, Track
from piper.plan.tasks import Comm
from piper.plan.types import Plan, RankClass, class_of


def classes_of(plan: Plan, timeline: Timeline) -> list[RankClass]:
    """Of every track. All ranks have to be there, each step has to have all tasks in their order, and
    communications have to have the names that all of their members know."""
    ranks = sorted(rank for track in timeline.tracks for rank in track.ranks)
    if ranks != list(range(plan.mesh.size)):
        raise PlanError(
            f"the timeline has {len(ranks)} ranks, plan {plan.content_hash()} {plan.mesh.size}",
            legal="a timeline of all ranks of the plan",
        )
    classes = [class_of(plan, track.ranks[0]) for track in timeline.tracks]
    for by_rank in (False, True):
        bad = [
            track
            for track, found in zip(timeline.tracks, classes, strict=True)
            if not _is_of(plan, found, track, by_rank=by_rank)
        ]
        if not bad:
            return classes
    raise PlanError(f"the timeline of {bad[0].name} is not one of plan {plan.content_hash()}")


def _is_of(plan: Plan, found: RankClass, track: Track, *, by_rank: bool) -> bool:
    num, steps = len(found.tasks), len(track.begins)
    alone = len(track.ranks) == 1
    return (
        (alone if by_rank else track.ranks == tuple(plan.mesh.ranks(found.slice)))
        and [label.name for label in track.labels] == [task.name for task in found.tasks]
        and [label.meeting for label in track.labels] == _meetings(plan, found, track, by_rank)
        and track.begins == [step * num for step in range(steps)]
        and track.which == array("I", range(num)) * steps
    )


def _meetings(plan: Plan, found: RankClass, track: Track, by_rank: bool) -> Sequence[str]:
    ends: dict[int, str] = {}
    for task in found.tasks:
        if isinstance(task, Comm) and task.group not in ends:
            ranks = plan.groups[task.group].ranks(plan.mesh, track.ranks[0])
            ends[task.group] = f"@{ranks[0]}" if by_rank else ""
    return [
        task.meeting + ends[task.group] if isinstance(task, Comm) else "" for task in found.tasks
    ]
