"""Properties of schedules: generators give legal tables, and the checker tells legal from illegal."""

from __future__ import annotations

import re
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import ScheduleError
from piper.schedules import (
    SCHEDULES,
    Action,
    Cell,
    Costs,
    Table,
    auto,
    check,
    one_f_one_b,
    peak_held,
    replay,
    schedule,
    takes_stages_per_rank,
    zb_h1,
    zb_h2,
)
from piper.schedules.generators.fill import fill
from piper.schedules.table import make_table

TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.25, 2.0])
COSTS = st.builds(Costs, F=TIMES, BI=TIMES, BW=TIMES, comm=st.sampled_from([0.0, 0.125, 0.5]))


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 12), st.integers(1, 4), st.integers(1, 40))
def test_a_generator_gives_a_legal_table_or_names_the_nearest_legal_number(
    name: str, ranks: int, per_rank: int, microbatches: int
) -> None:
    chosen = per_rank if takes_stages_per_rank(name) else None

    def make(num_ranks: int, num_microbatches: int) -> Table:
        return schedule(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=chosen,
        )

    try:
        table = make(ranks, microbatches)
    except ScheduleError as error:
        found = re.search(r"legal: .*: (?:(\d+) or )?(\d+) (microbatches|ranks)$", str(error))
        assert found, error
        legal, what = int(found[2]), found[3]
        if what == "ranks":
            assert legal > ranks
            make(legal, max(microbatches + microbatches % 2, 2 * legal))
            _all_refused(lambda n: make(n, 4 * legal), range(ranks, legal))
        else:
            assert legal > microbatches
            make(ranks, legal)
            lowest = microbatches
            if found[1]:
                make(ranks, int(found[1]))
                lowest = int(found[1]) + 1
            _all_refused(lambda m: make(ranks, m), range(lowest, legal))
        return
    assert check(table) is table
    assert (table.num_ranks, table.num_microbatches) == (ranks, microbatches)
    assert table.stages_per_rank == (chosen or table.stages_per_rank)


def _all_refused(make: Callable[[int], Table], numbers: range) -> None:
    for number in numbers:
        with pytest.raises(ScheduleError):
            make(number)


@given(st.integers(1, 8), st.integers(1, 24), COSTS, st.floats(1, 20), st.sampled_from([0.3, 1.0]))
def test_auto_keeps_to_its_memory_and_is_no_longer_than_what_needs_no_search(
    ranks: int, microbatches: int, costs: Costs, limit: float, kept: float
) -> None:
    sizes = {"num_ranks": ranks, "num_microbatches": microbatches}
    table = check(auto(**sizes, costs=costs, max_in_flight=limit, kept=kept))  # type: ignore[arg-type]
    assert max(peak_held(table, kept=kept)) <= limit + 1e-9
    for other in (one_f_one_b(**sizes), zb_h1(**sizes), zb_h2(**sizes)):
        if max(peak_held(other, kept=kept)) <= limit:
            assert replay(table, costs).span <= replay(other, costs).span + 1e-9


@given(st.integers(1, 6), st.integers(1, 16), COSTS, st.integers(2, 12))
def test_filling_and_replaying_agree_on_time(
    ranks: int, microbatches: int, costs: Costs, limit: int
) -> None:
    plain = schedule("eager_1f1b", num_ranks=ranks, num_microbatches=microbatches)
    rows = [
        [
            Action(a.stage, "F" if a.kind == "F" else "BI", a.microbatch)
            for c in row
            for a in c.actions
        ]
        for row in plain.rows
    ]
    filled = fill(rows, num_stages=ranks, num_microbatches=microbatches, limit=limit, costs=costs)
    table = make_table("filled", filled.rows, num_stages=ranks, num_microbatches=microbatches)
    assert replay(check(table), costs).span == pytest.approx(filled.span, abs=1e-9)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Complete tables: every action once, on its rank, in an order that may or may not run."""
    ranks, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stages, microbatches = ranks * per_rank, draw(st.integers(1, 3))
    home = draw(st.permutations([stage % ranks for stage in range(stages)]))
    actions = []
    for microbatch in range(microbatches):
        for stage in range(stages):
            kinds = draw(st.sampled_from([("F", "B"), ("F", "BI", "BW")]))
            actions += [Action(stage, kind, microbatch) for kind in kinds]  # type: ignore[arg-type]
    # A random order that could run, in which a few neighbours then change places.
    weight = {"F": 0, "B": 1, "BI": 1, "BW": 2}
    depth = {a: a.stage if a.kind == "F" else 2 * stages - a.stage for a in actions}
    late = {a: draw(st.integers(0, 8)) for a in actions}
    actions.sort(key=lambda a: (late[a] // 8 + depth[a] + 3 * a.microbatch, weight[a.kind], a))
    rows = [[a for a in actions if home[a.stage] == rank] for rank in range(ranks)]
    for row in rows:
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(row) - 1))
            row[at - 1], row[at] = row[at], row[at - 1]
    cells = []
    for row in rows:
        made, at = [], 0
        while at < len(row):
            size = draw(st.sampled_from([1, 1, 1, 1, 2]))
            group = tuple(row[at : at + size])
            made.append(Cell(group, "FUSED" if len(group) > 1 else ""))
            at += size
        cells.append(tuple(made))
    return Table("random", stages, microbatches, tuple(cells))


def _needs(action: Action, present: set[Action], stages: int) -> list[Action]:
    """What an action needs, from the law and not from the code under test."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if action.kind == "BW":
        return [Action(stage, "BI", microbatch)]
    later = [Action(stage + 1, kind, microbatch) for kind in ("B", "BI")]  # type: ignore[arg-type]
    return [Action(stage, "F", microbatch), *(a for a in later if a in present)]


def _longest_path(table: Table, costs: Costs) -> float | None:
    """The makespan by a topological sort of all cells, or None if there is a circle."""
    cell_of = {
        action: (rank, at)
        for rank, row in enumerate(table.rows)
        for at, cell in enumerate(row)
        for action in cell.actions
    }
    sorter: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    edges: dict[tuple[int, int], list[tuple[tuple[int, int], float]]] = {}
    for rank, row in enumerate(table.rows):
        for at, cell in enumerate(row):
            into = edges[rank, at] = [((rank, at - 1), 0.0)] if at else []
            for index, action in enumerate(cell.actions):
                for needed in _needs(action, set(cell_of), table.num_stages):
                    source = cell_of[needed]
                    if source != (rank, at):
                        into.append((source, costs.comm if source[0] != rank else 0.0))
                    elif cell.actions.index(needed) > index:
                        return None
            sorter.add((rank, at), *(source for source, _ in into))
    ends: dict[tuple[int, int], float] = {}
    try:
        for rank, at in sorter.static_order():
            begin = max((ends[source] + extra for source, extra in edges[rank, at]), default=0.0)
            ends[rank, at] = begin + sum(costs.of(a) for a in table.rows[rank][at].actions)
    except CycleError:
        return None
    return max(ends.values())


def test_the_checker_accepts_exactly_what_can_run() -> None:
    seen = {"accepted": 0, "refused": 0}

    @settings(max_examples=1000)
    @given(tables(), COSTS)
    def examine(table: Table, costs: Costs) -> None:
        longest = _longest_path(table, costs)
        if longest is None:
            seen["refused"] += 1
            with pytest.raises(ScheduleError, match=r"impossible|deadlock"):
                check(table)
        else:
            seen["accepted"] += 1
            assert replay(check(table), costs).makespan == pytest.approx(longest)

    examine()
    print(seen)
    assert min(seen.values()) >= 100, seen


@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.data(),
    st.sampled_from(["drop", "double", "move"]),
)
def test_a_dropped_doubled_or_moved_action_is_refused(
    name: str, half: int, data: st.DataObject, fault: str
) -> None:
    table = schedule(name, num_ranks=2 * half, num_microbatches=4 * half)
    rows = [list(row) for row in table.rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, len(rows[rank]) - 1))
    cell = rows[rank].pop(at)
    if fault == "double":
        rows[rank][at:at] = [cell, cell]
    elif fault == "move":
        rows[rank - 1].insert(data.draw(st.integers(0, len(rows[rank - 1]))), cell)
    broken = Table(
        "broken",
        table.num_stages,
        table.num_microbatches,
        tuple(map(tuple, rows)),
        table.num_directions,
    )
    words = {"drop": "incomplete", "double": "duplicated", "move": "impossible"}
    with pytest.raises(ScheduleError, match=words[fault]):
        check(broken)
