"""Exposed communication: what moves while nothing is computed, and who is to blame."""

from __future__ import annotations

import pytest

from piper.cost.presets import machine
from piper.insight.exposed import exposed
from piper.insight.step_text import exposed_text
from piper.observe.meetings import Meetings
from piper.sim.simulate import simulate
from tests.plans import plan_of
from tests.timelines import DIRECTIVES, two_ranks


def test_communication_beside_computation_is_hidden() -> None:
    """The all_reduce moves from when both are there, 0.5 ms after the first, until 17 ms."""
    rows = {row.kind: row for row in exposed(Meetings(two_ranks(), 1))}
    assert rows.keys() == {"all_reduce", "send"}
    assert rows["send"].exposed == pytest.approx(0, abs=1e-9)
    assert rows["send"].nbytes == 2 << 20 and rows["send"].exposed_bytes == 0
    assert rows["all_reduce"].seconds == pytest.approx(0.0015)
    assert rows["all_reduce"].exposed == pytest.approx(0.0015)
    assert rows["all_reduce"].exposed_bytes == 4096
    assert rows["all_reduce"].directive == DIRECTIVES[2]


def test_what_is_hidden_in_part_counts_in_part() -> None:
    timeline = two_ranks()
    for track in timeline.tracks:
        track.add(7, 0.0360, 0.0360, 0.0365)  # of the second step: a third of the all_reduce
    found = {row.kind: row for row in exposed(Meetings(timeline, 1))}["all_reduce"]
    assert found.exposed == pytest.approx(0.001)
    assert found.exposed_bytes == pytest.approx(4096 * 2 / 3, abs=1)
    first, row = exposed_text([found])
    assert first == f"exposed communication of {found.track}: 1 ms, 2.7 KiB"
    assert row.split()[:4] == ["1", "ms", "66.7%", "all_reduce,"]


def test_nothing_to_hide_is_said() -> None:
    timeline = two_ranks()
    for track in timeline.tracks:
        track.add(7, 0.0350, 0.0350, 0.0375)
    assert list(exposed_text(exposed(Meetings(timeline, 1)))) == ["exposed communication: none"]


def test_a_plan_names_the_directive_whose_communication_nothing_hides() -> None:
    timeline = simulate(plan_of("zero3"), machine("h100"), steps=2)
    assert "replicate" in exposed(Meetings(timeline, 1))[0].directive
