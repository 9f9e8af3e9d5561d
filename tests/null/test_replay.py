"""Replay: times by hand, costs of every kind, both shares of bubble."""

import numpy as np
import pytest

from piper.errors import ScheduleError
from piper.schedules import Costs, Table, from_rows, parse_costs, peak_held, replay, schedule

TWO = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def test_times_by_hand() -> None:
    replayed = replay(from_rows(TWO), Costs(F=2, BI=3, BW=1, comm=0.5))
    assert replayed.starts == [[0, 2, 9, 15], [2.5, 4.5, 8.5, 10.5]]
    assert replayed.ends == [[2, 4, 13, 19], [4.5, 8.5, 10.5, 14.5]]
    assert replayed.makespan == 19
    assert replayed.span == 19
    assert replayed.busy == [12, 12]
    assert replayed.bubble_of_makespan == pytest.approx(7 / 19)
    assert replayed.peak_in_flight == [2, 1]


def test_the_two_shares_of_bubble_differ_where_ranks_start_late() -> None:
    replayed = replay(schedule("zb_h2", num_ranks=4, num_microbatches=8))
    assert (replayed.makespan, replayed.span) == (27, 24)
    assert replayed.bubble_of_makespan == pytest.approx(3 / 27)
    assert replayed.bubble_of_span == 0


def test_a_full_backward_and_a_pair_have_costs_of_their_own() -> None:
    table = from_rows(["0F0,(0F1;0B0)OVERLAP_F_B,0B1"])
    assert replay(table).makespan == 1 + 3 + 2
    assert replay(table, Costs(B=1.5)).makespan == 1 + 2.5 + 1.5
    assert replay(table, Costs(B=1.5, FB=2)).makespan == 1 + 2 + 1.5
    fused = from_rows(["0F0,(0F1;0B0)FUSED,0B1"])
    assert replay(fused, Costs(FB=2)).makespan == 1 + 3 + 2


def test_each_stage_may_have_its_own_costs() -> None:
    replayed = replay(from_rows(TWO), Costs(F=(1, 2), BI=(1, 3), BW=0))
    assert replayed.busy == [4, 10]
    assert replay(from_rows(TWO), Costs(F=[1, 2], BI=[1, 3], BW=0)) == replayed  # type: ignore[arg-type]
    for numbers in ((1,), (1, 2, 3)):
        with pytest.raises(ScheduleError, match=f"has {len(numbers)} numbers, but there are 2 st"):
            replay(from_rows(TWO), Costs(F=numbers))


def test_neighbours_on_one_rank_exchange_without_cost() -> None:
    table = from_rows(["0F0,1F0,1B0,0B0"])
    assert replay(table, Costs(comm=100)).makespan == 6


def test_everything_in_a_fused_cell_is_ready_at_its_end() -> None:
    apart = replay(from_rows(["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]))
    fused = replay(from_rows(["(0F0;0F1)FUSED,0B0,0B1", "1F0,1F1,1B0,1B1"]))
    assert fused.starts[1][0] == apart.starts[1][0] + 1


def test_a_fused_cell_runs_in_sequence_and_a_pair_at_once() -> None:
    assert replay(from_rows(["0F0,(0B0;0F1)FUSED,0B1"])).peak_in_flight == [1]
    assert replay(from_rows(["0F0,(0B0;0F1)OVERLAP_F_B,0B1"])).peak_in_flight == [2]


def test_a_table_that_does_not_end_is_no_replay() -> None:
    broken = Table("broken", 2, 1, from_rows(["0F0,0B0"]).rows)
    with pytest.raises(ScheduleError, match="incomplete: no rank runs stage 1"):
        replay(broken)
    with pytest.raises(ScheduleError, match="incomplete: rank 0 runs nothing"):
        replay(Table("broken", 1, 1, ((),)))


def test_what_is_held_between_the_halves() -> None:
    table = from_rows(["0F0,0I0,0F1,0I1,0F2,0I2,0W0,0W1,0W2"])
    assert peak_held(table) == [3]
    assert peak_held(table, kept=0.25) == [1.5]


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("F=2,BI=1.5,BW=1,comm=0.1", Costs(F=2, BI=1.5, BW=1, comm=0.1)),
        ("F&B=2.5,B=2", Costs(FB=2.5, B=2)),
        ("F=1:1.25", Costs(F=(1, 1.25))),
    ],
)
def test_costs_are_written_and_read(text: str, costs: Costs) -> None:
    assert parse_costs(text) == costs
    assert parse_costs(str(costs)) == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F=1,X=2", "cost 'X=2' is not understood"),
        ("F", "cost 'F' is not understood"),
        ("F=fast", "cost 'F=fast' is not understood"),
        ("F=1,F=2", "cost F is given twice"),
        ("F=-1", "cost F=-1.0 is no time"),
        ("BW=nan", "cost BW=nan is no time"),
        ("comm=1:2", "cost comm is one number for all stages"),
        ("F=1e308", "is no time"),
    ],
)
def test_bad_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_costs(text)


def test_costs_may_be_numbers_of_any_library() -> None:
    assert replay(from_rows(TWO), Costs(F=np.float32(0.5))).busy == [5, 5]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "costs",
    [
        {"F": "1"},
        {"F": None},
        {"F": (1, None)},
        {"F": True},
        {"comm": (1, 2)},
        {"F": 10**400},
        {"FB": (1,)},
        {"F": ()},
    ],
)
def test_costs_of_a_wrong_type_are_refused(costs: dict) -> None:
    with pytest.raises(ScheduleError, match="is no time"):
        Costs(**costs)
