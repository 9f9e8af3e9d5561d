"""What holds of every timeline that was measured of a plan."""

from __future__ import annotations

from collections import defaultdict

from piper.observe.timeline import Timeline
from piper.plan.tasks import Comm
from piper.plan.types import Plan, bind

ROUNDING = 1e-9


def check_measured(timeline: Timeline, plan: Plan, *, steps: int) -> None:
    assert timeline.source == "measured"
    assert timeline.plan == plan.content_hash()
    assert [track.ranks for track in timeline.tracks] == [(r,) for r in range(plan.mesh.size)]
    assert len(timeline.steps) == steps
    assert timeline.steps[0][0] == 0.0
    assert all(a <= b for a, b in timeline.steps)
    assert all(timeline.steps[i][1] <= timeline.steps[i + 1][0] for i in range(steps - 1))
    for rank, track in enumerate(timeline.tracks):
        tasks = bind(plan, rank).tasks
        assert len(track) == steps * len(tasks)
        assert len(track.waited) == len(track)
        for step in range(steps):
            spans = [track[i] for i in track.step(step)]
            assert [span.label.name for span in spans] == [task.name for task in tasks]
            begin, end = timeline.steps[step]
            done = 0.0  # when the last task that the host ran itself was
            for task, span in zip(tasks, spans, strict=True):
                assert begin <= span.start <= span.end <= end
                assert span.waited >= 0
                waited = max((spans[wait].end for wait in task.waits), default=0.0)
                assert waited <= span.start + timeline.clock_error + ROUNDING, span.label.name
                if not isinstance(task, Comm):
                    assert span.start >= done - ROUNDING, span.label.name
                    assert (span.issued, span.waited) == (span.start, 0.0)
                    done = span.end
    _check_meetings(timeline, steps)
    peaks = [sum(column.peak for column in track.memory.values()) for track in timeline.tracks]
    assert all(peaks)


def _check_meetings(timeline: Timeline, steps: int) -> None:
    """Nothing has come before it was sent, and no collective is over before all were there."""
    starts: dict[tuple[str, int], list[float]] = defaultdict(list)
    ends: dict[tuple[str, int], list[tuple[float, bool]]] = defaultdict(list)
    for track in timeline.tracks:
        for step in range(steps):
            for span in (track[i] for i in track.step(step) if track[i].label.communicates):
                key = span.label.meeting, step
                alone = "send" in span.label.kind  # it may be over before anybody receives
                if not span.label.receives:
                    starts[key].append(span.start)
                ends[key].append((span.end, alone))
    for key, found in ends.items():
        assert len(found) > 1, key
        for end, alone in found:
            assert alone or end >= max(starts[key]) - timeline.clock_error - ROUNDING, key
