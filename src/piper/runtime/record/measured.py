"""Measured: a plan and the times of its ranks in, their Timeline out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from piper.observe.timeline import Label, Timeline, Track
from piper.plan.report.task_labels import ClassLabels
from piper.plan.report.track_memory import fill_memory
from piper.plan.types import Plan, hash_of
from piper.runtime.record.recorder import RankTimes

NANOSECOND = 1e-9


def measured_timeline(plan: Plan, ranks: Sequence[RankTimes]) -> Timeline:
    """A track per rank. Times count from the begin of the first step: the earliest of all ranks."""
    steps = max((rank.steps for rank in ranks), default=0)
    begin = min(
        (min(column) for rank in ranks for column in _columns(rank)[:2] if column), default=0
    )
    tracks = []
    for found in plan.classes:
        labels = ClassLabels(plan, found)
        for number in plan.mesh.ranks(found.slice):
            tracks.append(_track(number, labels.of_rank(number), ranks[number], begin, steps))
    tracks.sort(key=lambda track: track.ranks)
    if plan.device == "cpu":
        _end_sends(tracks)
    for found in plan.classes:
        for number in plan.mesh.ranks(found.slice):
            fill_memory(plan, found, tracks[number])
    plan_json = plan.to_json()
    return Timeline(
        "measured",
        tracks,
        [_bounds(tracks, step) for step in range(steps)],
        tuple(map(str, plan.history)),
        hash_of(plan_json),
        NANOSECOND * sum(sorted(rank.error for rank in ranks)[-2:]),
        host_computes=plan.device == "cpu",
        plan_json=plan_json,
    )


def _columns(rank: RankTimes) -> tuple[array[int], array[int], array[int]]:
    return rank.issued, rank.start, rank.end


def _track(
    number: int, labels: tuple[Label, ...], rank: RankTimes, begin: int, steps: int
) -> Track:
    spans, num = rank.steps * len(labels), len(labels)
    issued, start, end = (
        array("d", (NANOSECOND * (time - begin) for time in column)) for column in _columns(rank)
    )
    end = array("d", map(max, start, end))  # whatever a driver says of two events
    return Track(
        f"rank {number}",
        (number,),
        labels,
        which=array("I", range(num)) * rank.steps,
        issued=issued,
        start=start,
        end=end,
        begins=[min(step * num, spans) for step in range(steps)],
        waited=array("d", (NANOSECOND * time for time in rank.waited)),
    )


def _bounds(tracks: Sequence[Track], step: int) -> tuple[float, float]:
    first = min((min(t.issued[i], t.start[i]) for t in tracks for i in t.step(step)), default=0.0)
    return first, max((t.end[i] for t in tracks for i in t.step(step)), default=0.0)


def _end_sends(tracks: Sequence[Track]) -> None:
    """A send is over, at the latest, when its receiver has everything: its own host may have seen that
    much later."""
    arrivals = {
        label.meeting: (track, index)
        for track in tracks
        for index, label in enumerate(track.labels)
        if label.receives
    }
    for track in tracks:
        for index, label in enumerate(track.labels):
            found = arrivals.get(label.meeting)
            if found is None or label.receives:
                continue
            other, there = found
            for mine, theirs in zip(track.begins, other.begins, strict=True):
                arrived = max(other.end[theirs + there], track.start[mine + index])
                track.end[mine + index] = min(track.end[mine + index], arrived)
