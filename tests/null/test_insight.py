"""Why a step takes as long as it does: the critical path, and what is planted into it."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from piper.cost.machine import Link, Machine
from piper.errors import FileError, PlanError
from piper.insight.causes import Causes
from piper.insight.critical_path import WAITING, critical_path
from piper.insight.diff_text import diff_text
from piper.insight.gaps import gap_at, largest_gaps
from piper.insight.reason_text import gap_text, what_if_text
from piper.insight.step_text import step_text
from piper.insight.suspects import _Held, _Ratios, shared_times, suspects
from piper.insight.timeline_diff import timeline_diff
from piper.insight.use_of_time import union, use_of_time
from piper.insight.what_if import what_if, what_if_replayed
from piper.observe.timeline import Timeline
from piper.sim.disturbances import Jitter, SlowBody, SlowLink, SlowRank
from piper.sim.measured_costs import MeasuredCosts
from piper.sim.simulate import simulate
from piper.sim.task_costs import GivenCosts
from tests.null.test_simulate import PAPER_MACHINE, layers_plan
from tests.null.test_simulate_scale import _narrow_plan


def _machine(**changes: Any) -> Machine:
    link = Link(2e-6, 1e11, share=0.1)
    values: dict[str, Any] = {
        "name": "test", "flops": {"float32": 1e12}, "bandwidth": 1e12, "node": link, "network": link,
        "ranks_per_node": 8, "launch": 1e-5, "dispatch": 1e-6, "exchange": 1e-6,
    }  # fmt: skip
    return Machine(**{**values, **changes})


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 3, "zero": 3}, {"pp": 2, "dp": 2, "zero": 2}]
)
def test_the_parts_of_the_path_sum_up_to_the_step(degrees: dict, host_computes: bool) -> None:
    plan = layers_plan(4, 4, **degrees)
    timeline = simulate(plan, _machine(host_computes=host_computes), steps=2)
    path = critical_path(Causes(plan, timeline))
    begin, end = timeline.steps[1]
    assert path.seconds == pytest.approx(end - begin)
    for one, other in zip(path.segments, path.segments[1:], strict=False):
        assert one.end == pytest.approx(other.begin)
    for sums in (path.by_kind, path.by_directive, path.by_track):
        assert sum(sums.values()) == pytest.approx(path.seconds)


def test_the_path_of_1f1b_is_the_one_on_paper() -> None:
    plan = layers_plan(4, 8, pp=4, schedule="1f1b")
    costs = GivenCosts({"F": 1.0, "B": 2.0}, 0.25)
    path = critical_path(Causes(plan, simulate(plan, PAPER_MACHINE, costs=costs)))
    assert path.by_kind["F"] + path.by_kind["B"] + path.by_kind["recv"] == pytest.approx(
        path.seconds
    )
    assert path.by_kind.get(WAITING, 0.0) == 0.0


def test_a_gap_names_the_rank_and_the_task_that_it_waits_for() -> None:
    plan = layers_plan(4, 8, pp=4, schedule="1f1b")
    costs = GivenCosts({"F": 1.0, "B": 2.0}, 0.25)
    causes = Causes(plan, simulate(plan, PAPER_MACHINE, costs=costs))
    gap = gap_at(causes, 3, 2.0)
    assert gap is not None and (gap.begin, gap.end) == (0.0, 3.75)
    assert (gap.before, gap.after) == ("the step's begin", "F[PP=3,MB=0]")
    ran = [(link.track, link.task) for link in gap.chain if link.task.startswith("F[")]
    assert ran == [("pp=2", "F[PP=2,MB=0]"), ("pp=1", "F[PP=1,MB=0]"), ("pp=0", "F[PP=0,MB=0]")]
    assert gap_at(causes, 0, 0.5) is None
    longest = largest_gaps(causes, most=3)
    assert longest == sorted(longest, key=lambda found: -found.seconds)
    with pytest.raises(FileError, match="has no rank 9"):
        gap_at(causes, 9, 0.5)
    with pytest.raises(FileError, match="is not in the step"):
        gap_at(causes, 0, 1e9)


def test_a_gap_at_the_steps_end_is_one_at_its_last_moment_too() -> None:
    plan = layers_plan(4, 4, pp=2, dp=2)
    causes = Causes(plan, simulate(plan, _machine(host_computes=True, exchange=1e-4), steps=2))
    ends = {gap.track: gap for gap in largest_gaps(causes, most=50) if gap.end == causes.end}
    assert len(ends) == 2
    for rank, track in ((0, "pp=0"), (2, "pp=1")):
        for late in (0.0, 4e-7):  # as it is shown, it may be rounded up
            assert gap_at(causes, rank, causes.end + late) == ends[track]
        first = ends[track].chain[0]
        assert first.why == "end" and first.end == causes.end
        text = "\n".join(gap_text(causes, ends[track]))
        assert f"it has nothing left to compute; the step ends with {first.task} on " in text
        assert f"its peer {first.task} on {track}" not in text
    with pytest.raises(FileError, match="is not in the step"):
        gap_at(causes, 0, causes.end + 1e-6)


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 2, "dp": 2, "zero": 3}])
def test_a_chain_goes_back_in_time(degrees: dict, host_computes: bool) -> None:
    """Behind a message that a host has only started come its own tasks, not the message's sender."""
    plan = layers_plan(4, 4, **degrees)
    timeline = simulate(plan, _machine(host_computes=host_computes, exchange=1e-4), steps=2)
    causes = Causes(plan, timeline)
    for gap in largest_gaps(causes, most=30):
        assert gap.chain, gap
        ends = [gap.end, *(link.end for link in gap.chain)]
        assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize(
    ("planted", "of", "name"),
    [
        (SlowRank(2, 1.6), "rank", "2"),
        (SlowLink((0, 2), 8.0), "link", "0-2"),
        (SlowBody("B[PP=1,", 1.5), "body", "B[PP=1]"),
    ],
)
def test_what_is_planted_is_found(planted: Any, of: str, name: str, host_computes: bool) -> None:
    plan = layers_plan(4, 8, pp=2, dp=2, schedule="interleaved_1f1b")
    machine = _machine(host_computes=host_computes)
    predicted = Causes(plan, simulate(plan, machine))
    shaken = (planted, Jitter(0.03))
    measured = Causes(plan, simulate(plan, machine, disturbances=shaken))
    found = suspects(measured, predicted)
    assert (found[0].of, found[0].name) == (of, name), list(map(str, found))
    assert found[0].factor == pytest.approx(planted.factor, rel=0.1)
    assert {suspect.of for suspect in found} == {of}, list(map(str, found))
    quiet = Causes(plan, simulate(plan, machine, disturbances=[Jitter(0.03)]))
    assert suspects(quiet, predicted) == []


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"dp": 2}])
def test_the_only_link_is_named_beside_a_prediction(degrees: dict, host_computes: bool) -> None:
    plan, machine = layers_plan(4, 4, **degrees), _machine(host_computes=host_computes)
    predicted = Causes(plan, simulate(plan, machine))
    slow = simulate(plan, machine, disturbances=[SlowLink((0, 1), 8.0), Jitter(0.03)])
    [found] = suspects(Causes(plan, slow), predicted)
    assert (found.of, found.name, found.ranks) == ("link", "0-1", (0, 1))
    assert found.factor == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize("degrees", [{}, {"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}])
def test_what_is_off_everywhere_is_said_once(degrees: dict) -> None:
    """A prediction for another machine is no fault of any rank, link or body."""
    plan = layers_plan(4, 4, **degrees)
    exact = _machine(host_computes=True)
    predicted = Causes(plan, simulate(plan, exact))

    def said(compute: float, exchange: float) -> list[str]:
        slow = _machine(
            host_computes=True,
            flops={"float32": 1e12 / compute},
            bandwidth=1e12 / compute,
            launch=1e-5 * compute,
            node=Link(2e-6 * exchange, 1e11 / exchange, share=0.1),
        )
        found = suspects(Causes(plan, simulate(plan, slow, by_rank=True)), predicted)
        return [str(suspect).rpartition(":")[0] for suspect in found]

    alike = "takes 1.60 x as long as predicted, on all ranks alike"
    assert said(1.6, 1.6) == [f"everything {alike}"]
    assert said(1.6, 1.0) == [f"{'all computation' if degrees else 'everything'} {alike}"]
    assert said(1.0, 1.0) == []


def test_what_uses_a_link_at_once_shares_the_time() -> None:
    assert shared_times([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == [1.5, 1.5, 1.0]
    assert shared_times([(0.0, 3.0), (0.0, 3.0), (0.0, 3.0)]) == [1.0, 1.0, 1.0]


def test_medians_without_a_group_are_those_of_the_others() -> None:
    chance = random.Random(0)
    for _ in range(200):
        names = [("rank", str(chance.randint(0, 3))) for _ in range(chance.randint(1, 30))]
        weights = [chance.choice([1.0, 1.0, 0.1, 3.0, chance.random()]) for _ in names]
        held = [
            _Held(0, chance.choice([1.0, 2.0, chance.random()]) * weight, weight, (name,))
            for name, weight in zip(names, weights, strict=True)
        ]
        ratios = _Ratios(held)
        for name, mine in ratios.groups.items():
            inside = [each for each in held if name in each.names]
            outside = [each for each in held if name not in each.names]
            assert ratios.usual_of(mine) == _weighted_median(inside)
            assert ratios.usual_without(mine) == _weighted_median(outside)


def _weighted_median(held: list[_Held]) -> float:
    upto, half = Fraction(0), sum(Fraction(each.predicted) for each in held) / 2
    for each in sorted(held, key=lambda each: each.ratio):
        upto += Fraction(each.predicted)
        if upto >= half * (1 - Fraction(1, 10**9)):
            return each.ratio
    return 0.0


def test_four_times_the_ranks_take_four_times_as_long_to_judge() -> None:
    machine, took = _machine(), dict.fromkeys((16, 64), 1e9)
    steps = {}
    for dp in took:
        plan = _narrow_plan(dp, 4)
        slow = simulate(plan, machine, disturbances=[SlowRank(3, 2.0)])
        steps[dp] = Causes(plan, slow), Causes(plan, simulate(plan, machine))
    for dp in (*took,) * 3:
        begin = time.process_time()
        found = suspects(*steps[dp])
        took[dp] = min(took[dp], time.process_time() - begin)
        assert (found[0].of, found[0].name) == ("rank", "3")
    assert took[64] < 8 * took[16], took


def test_a_planted_gap_is_found() -> None:
    plan = layers_plan(4, 8, pp=2, dp=2)
    machine = _machine(host_computes=True)
    predicted = Causes(plan, simulate(plan, machine, by_rank=True))
    timeline = simulate(plan, machine, by_rank=True)
    track = timeline.track_of(3)
    at = next(i for i, span in enumerate(track) if span.label.name.startswith("B[PP=1,MB=4"))
    for column in (track.issued, track.start, track.end):
        for span in range(at, len(track)):
            column[span] += 0.01
    timeline.steps[0] = (0.0, timeline.steps[0][1] + 0.01)
    found = suspects(Causes(plan, timeline), predicted)
    assert [(s.of, s.name, s.ranks) for s in found] == [("gap", track[at].label.name, (3,))]
    assert found[0].seconds == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("host_computes", [False, True])
def test_a_tracks_time_is_used_up(host_computes: bool) -> None:
    plan = layers_plan(4, 4, pp=2, dp=2, zero=3)
    timeline = simulate(plan, _machine(host_computes=host_computes), steps=2)
    for use in use_of_time(timeline):
        assert use.computing + use.exposed + use.idle == pytest.approx(use.seconds)
        assert min(use.computing, use.exposed, use.hidden) > 0 and use.idle >= -1e-12
        assert use.hidden <= use.computing


def test_a_host_that_is_held_is_told() -> None:
    plan = layers_plan(2, 2, pp=2)
    timeline = simulate(plan, _machine(host_computes=True), steps=2)
    assert [use.held for use in use_of_time(timeline)] == [0.0, 0.0]
    assert "host held" not in step_text(plan, Causes(plan, timeline))
    for track in timeline.tracks:
        track.waited.extend([0.0] * len(track))
    track, seconds = timeline.tracks[1], timeline.step_seconds[1]
    for span in (0, *track.step(1)[:2]):  # one of them of the step before
        track.waited[span] = seconds / 8
    assert [use.held for use in use_of_time(timeline)] == [0.0, pytest.approx(seconds / 4)]
    first, second = step_text(plan, Causes(plan, timeline)).splitlines()[1:3]
    assert "held" not in first and second.endswith("; host held 25.0%")


def test_a_step_of_no_length_is_told() -> None:
    plan = layers_plan(2, 2, pp=2)
    nothing = simulate(plan, _machine(), costs=GivenCosts({}))
    causes = Causes(plan, nothing)
    assert nothing.step_seconds == [0.0]
    assert "computes 0.0%, waits for communication 0.0%, idle 0.0%" in step_text(plan, causes)
    assert suspects(causes, causes) == [] and list(diff_text(timeline_diff(nothing, nothing)))
    nothing.source = "measured"
    found = what_if_replayed(plan, nothing, "F")
    assert (found.seconds, found.changed, found.recorded, found.off) == (0.0, 0.0, 0.0, 0.0)
    assert "no step is further off than 0.0%" in next(iter(what_if_text([found])))
    track = nothing.tracks[1]
    update = next(i for i, span in enumerate(track) if span.label.kind == "update")
    track.end[update] = 1.0  # in a step that says that it took no time
    assert what_if_replayed(plan, nothing, "F").off == math.inf


def _pop_span(timeline: Timeline) -> None:
    for name in ("which", "issued", "start", "end"):
        getattr(timeline.tracks[0], name).pop()


def _rename_meeting(timeline: Timeline) -> None:
    track = timeline.tracks[0]
    track.labels = tuple(
        msgspec.structs.replace(label, meeting="elsewhere") if label.meeting else label
        for label in track.labels
    )


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        _pop_span,
        _rename_meeting,
        lambda timeline: timeline.tracks.pop(),
        lambda timeline: timeline.tracks[0].which.__setitem__(slice(0, 2), array("I", [1, 0])),
        lambda timeline: timeline.tracks[0].begins.__setitem__(1, 3),
        lambda timeline: setattr(timeline.tracks[0], "ranks", (7,)),
    ],
)
def test_a_timeline_that_is_not_of_the_plan_is_refused(
    damage: Callable[[Timeline], Any], by_rank: bool
) -> None:
    plan = layers_plan(2, 2, pp=2, dp=2)
    timeline = simulate(plan, _machine(), steps=2, by_rank=by_rank)
    Causes(plan, timeline)
    damage(timeline)
    with pytest.raises(PlanError, match=r"not one of plan|the timeline has"):
        Causes(plan, timeline)
    with pytest.raises(PlanError, match=r"not one of plan|the timeline has"):
        MeasuredCosts(plan, timeline, timeline.settled)


def test_unions_have_no_overlaps() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]


def test_what_if_something_were_free() -> None:
    plan, machine = layers_plan(4, 4, pp=2, dp=2), _machine()
    with pytest.raises(FileError, match="did you mean 'all_reduce'"):
        what_if(plan, machine, "all_redu")
    reduced = what_if(plan, machine, "all_reduce")
    assert reduced.tasks > 0 and 0 < reduced.gain < 1
    slower = what_if(plan, machine, "B[PP=1", 2.0)
    assert slower.gain < 0 and "longer" in str(slower)
    sent, received = (what_if(plan, machine, end, 100.0) for end in ("send", "recv"))
    assert sent.gain == received.gain < -0.01  # both ends are one message
    made = what_if(plan, machine, "replicate")
    assert made.tasks >= reduced.tasks - 2 and made.gain > 0
