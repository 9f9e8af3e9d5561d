"""The simulator: schedules as on paper, links and devices that are shared, ranks that are slow."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.cost.machine import Link, Machine
from piper.mesh import Group, Mesh
from piper.observe.timeline import Timeline
from piper.plan.types import Plan
from piper.schedules import SCHEDULES, Costs, replay, schedule
from piper.schedules.table import Cell, Table
from piper.sim.disturbances import Jitter, SlowBody, SlowLink, SlowRank, disturbed
from piper.sim.engine import ALONE, Engine, Meeting, Row, Work
from piper.sim.simulate import simulate
from piper.sim.task_costs import GivenCosts
from piper.strategies import parallel

HERE = Path(__file__).parent / "conformance"
PAPER = json.loads((HERE / "zero_bubble_paper.json").read_text())["rows"]
WIDTH = 8192  # so that the compiler, too, takes computation for longer than messages; nothing runs
NOTHING = Link(0.0, 1e15)
PAPER_MACHINE = Machine("paper", {"float32": 1e15}, 1e15, NOTHING, NOTHING, 8, holds_share=False)


class Layers(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@functools.cache
def layers_plan(layers: int, microbatches: int, **degrees: Any) -> Plan:
    rows = 2 * microbatches * degrees.get("dp", 1)
    program = piper.trace(
        lambda: Layers(layers), torch.randn(rows, WIDTH), lambda model, batch: model(batch)
    )
    with mock.patch("piper.passes.piece_sizes.SMALLEST", 1 << 60):  # a stage is one chunk
        return program.apply(parallel(microbatches=microbatches, **degrees)).lower().plan


@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"{row['model']}-{row['m']}")
def test_1f1b_has_the_bubble_rates_of_the_zero_bubble_paper(row: dict) -> None:
    plan = layers_plan(row["p"], row["m"], pp=row["p"], schedule="1f1b")
    phases = {"F": row["TF"], "BI": row["TB"], "BW": row["TW"], "B": row["TB"] + row["TW"]}
    # A first stage has no input gradient to compute; the paper's takes as long as the others.
    timeline = simulate(plan, PAPER_MACHINE, costs=GivenCosts(phases, row["Tcomm"]))
    cost = max(max(ends) - min(starts) for starts, ends in _runs(timeline))
    rate = 1 - row["m"] * (row["TF"] + row["TB"] + row["TW"]) / cost
    assert round(rate, 4) == row["bubble"]["1F1B"]


def _runs(timeline: Timeline) -> list[tuple[list[float], list[float]]]:
    found = [[span for span in track if span.label.kind == "run"] for track in timeline.tracks]
    return [([span.start for span in row], [span.end for span in row]) for row in found]


def _one_by_one(table: Table) -> Table:
    """What is joined takes its turn in a plan: its results leave one by one."""
    rows = tuple(
        tuple(Cell((action,)) for cell in row for action in cell.actions) for row in table.rows
    )
    return msgspec.structs.replace(table, rows=rows)


@pytest.mark.parametrize("comm", [0.0, 0.25])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dualpipe"])
def test_every_schedule_takes_as_long_as_its_table(name: str, comm: float) -> None:
    ranks, microbatches = 4, 8
    table = _one_by_one(schedule(name, num_ranks=ranks, num_microbatches=microbatches))
    plan = layers_plan(table.num_stages, microbatches, pp=ranks, schedule=name)
    # A first stage has no input gradient to compute: its half stands where its weight half does.
    first = (1.0,) + (2.0,) * (table.num_stages - 1)
    costs = Costs(comm=comm, BI=(0.0,) + (1.0,) * (table.num_stages - 1), B=first)
    wanted = replay(_late_halves(table), costs)
    phases = {"F": 1.0, "BI": 1.0, "BW": 1.0, "B": 2.0}
    found = simulate(plan, PAPER_MACHINE, costs=_FirstStage(phases, comm))
    for row, (starts, ends) in enumerate(_runs(found)):
        kept = [i for i, end in enumerate(wanted.ends[row]) if end > wanted.starts[row][i]]
        assert starts == pytest.approx([wanted.starts[row][i] for i in kept])
        assert ends == pytest.approx([wanted.ends[row][i] for i in kept])


def _late_halves(table: Table) -> Table:
    rows = []
    for row in table.rows:
        kept = [cell for cell in row if not _is_first(cell, "BI")]
        for cell in [cell for cell in kept if _is_first(cell, "BW")]:
            half = msgspec.structs.replace(cell.actions[0], kind="BI")
            kept.insert(kept.index(cell), Cell((half,)))
        rows.append(tuple(kept))
    return msgspec.structs.replace(table, rows=tuple(rows))


def _is_first(cell: Cell, kind: str) -> bool:
    [action] = cell.actions
    return action.stage == 0 and action.kind == kind


class _FirstStage(GivenCosts):
    """A whole backward of the first stage is its weight half."""

    def compute(self, party: Any) -> list[float]:
        found = super().compute(party)
        for index, task in enumerate(party.tasks):
            if task.name.startswith("B[PP=0,"):
                found[index] = self.phases["BW"]
        return found


def _machine(**changes: Any) -> Machine:
    link = Link(1e-6, 1e12)
    values: dict[str, Any] = {
        "name": "test", "flops": {"float32": 1e12}, "bandwidth": 1e12, "node": link, "network": link,
        "ranks_per_node": 8, "launch": 1e-5, "dispatch": 1e-7,
    }  # fmt: skip
    return Machine(**{**values, **changes})


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_class_of_ranks_stands_for_all_of_them(zero: int, host_computes: bool) -> None:
    plan = layers_plan(4, 4, pp=2, dp=3, zero=zero)
    machine = _machine(host_computes=host_computes)
    classes = simulate(plan, machine, steps=2)
    ranks = simulate(plan, machine, steps=2, by_rank=True)
    assert len(classes.tracks) == 2 and len(ranks.tracks) == 6
    assert classes.steps == pytest.approx(ranks.steps)
    for rank in range(6):
        one, same = classes.track_of(rank), ranks.track_of(rank)
        assert same.ranks == (rank,)
        assert list(one.start) == pytest.approx(list(same.start))
        assert list(one.end) == pytest.approx(list(same.end))


@pytest.mark.parametrize("host_computes", [False, True])
def test_tasks_keep_the_order_that_the_plan_gives_them(host_computes: bool) -> None:
    plan = layers_plan(4, 4, pp=2, dp=2, zero=3)
    timeline = simulate(plan, _machine(host_computes=host_computes))
    assert timeline.num_spans == sum(len(found.tasks) for found in plan.classes)
    for track, found in zip(timeline.tracks, plan.classes, strict=True):
        last: dict[int, float] = {}
        for index, task in enumerate(found.tasks):
            span = track[index]
            came = span.start if host_computes else span.issued
            assert span.label.name == task.name and came <= span.start <= span.end
            assert all(track.end[wait] <= span.start for wait in task.waits)
            if not host_computes:
                assert span.start >= last.get(task.stream, 0.0)
                last[task.stream] = span.end


def _row(seconds: list[float], meeting: list[int], needs: list[tuple[int, ...]]) -> Row:
    size = len(seconds)
    names = [f"t{i}" for i in range(size)]
    return Row("row", Work(names, [0.0] * size, needs, [False] * size), seconds, meeting)


def test_communications_share_a_link_and_take_from_computation() -> None:
    row = _row([4.0, 0.0, 0.0], [ALONE, 0, 1], [(), (), ()])
    meetings = [Meeting(0.5, 1.0, 0.25, False, [(0, 1)]), Meeting(0.5, 2.0, 0.25, False, [(0, 2)])]
    [end] = Engine([row], meetings, host_computes=False).run([0.0]).end
    # From 0.5 on both flow at half their rate; the first is over at 2.5, the other at 3.5. Meanwhile
    # computation has half of the device, then three quarters of it.
    assert end == pytest.approx([0.5 + 2.0 + 1.0 + (4.0 - 0.5 - 1.0 - 0.75), 2.5, 3.5])


def test_messages_both_ways_do_not_share_a_link_and_lanes_widen_it() -> None:
    rows = [_row([0.0, 0.0], [0, 1], [(), ()]) for _ in range(2)]
    members = [(0, 0), (1, 0)], [(0, 1), (1, 1)]

    def ends(*senders: int | None, lanes: float = 1.0) -> list[float]:
        meetings = [
            Meeting(0.0, 1.0, 0.0, False, list(each), sender)
            for each, sender in zip(members, senders, strict=True)
        ]
        found = Engine(rows, meetings, host_computes=False, lanes=lanes).run([0.0, 0.0])
        assert found.end[0] == found.end[1]
        return found.end[0]

    assert ends(0, 1) == pytest.approx([1.0, 1.0])
    assert ends(0, 0) == pytest.approx([2.0, 2.0])
    assert ends(0, None) == pytest.approx([2.0, 2.0])  # a collective goes both ways
    assert ends(0, 0, lanes=1.6) == pytest.approx([1.25, 1.25])
    assert ends(0, 0, lanes=2.0) == pytest.approx([1.0, 1.0])


def test_a_collective_holds_its_share_while_it_waits_for_others() -> None:
    early = _row([0.0, 4.0], [0, ALONE], [(), ()])
    late = _row([2.0, 0.0], [ALONE, 0], [(), (0,)])
    for holds in (True, False):
        meeting = Meeting(0.0, 1.0, 0.5, holds, [(0, 0), (1, 1)])
        found = Engine([early, late], [meeting], host_computes=False).run([0.0, 0.0])
        assert found.end[0][0] == found.end[1][1] == pytest.approx(3.0)
        computed = 3.0 * 0.5 if holds else 2.0 + 0.5
        assert found.end[0][1] == pytest.approx(3.0 + 4.0 - computed)


def test_a_host_that_computes_waits_where_a_task_needs_a_communication() -> None:
    one = _row([0.0, 1.0, 1.0], [0, ALONE, ALONE], [(), (), (0,)])
    other = _row([3.0, 0.0], [ALONE, 0], [(), ()])
    meeting = Meeting(0.25, 0.0, 0.0, False, [(0, 0), (1, 1)])
    found = Engine([one, other], [meeting], host_computes=True).run([0.0, 0.0])
    assert found.end == [[3.25, 1.0, 4.25], [3.0, 3.25]]


def test_the_host_goes_on_behind_what_it_reads() -> None:
    row = _row([1.0, 1.0], [ALONE, ALONE], [(), ()])
    row.work.host = [0.1, 0.1]
    [end] = Engine([row], [], host_computes=False).run([0.0]).end
    assert end == pytest.approx([2.0, 2.1])  # both at once, each at half its rate
    row.work.blocks = [True, False]
    [end] = Engine([row], [], host_computes=False).run([0.0]).end
    assert end == pytest.approx([1.1, 2.2])


def test_ranks_that_wait_for_each_other_are_named() -> None:
    one = _row([0.0, 0.0], [0, 1], [(), (0,)])
    other = _row([0.0, 0.0], [1, 0], [(), (0,)])
    meetings = [
        Meeting(0.0, 1.0, 0.0, False, [(0, 0), (1, 1)]),
        Meeting(0.0, 1.0, 0.0, False, [(0, 1), (1, 0)]),
    ]
    with pytest.raises(piper.PiperError, match="t0 on row never ends"):
        Engine([one, other], meetings, host_computes=False).run([0.0, 0.0])


def test_what_is_slow_makes_steps_longer() -> None:
    plan, machine = layers_plan(4, 4, pp=2, dp=2), _machine()
    alone = simulate(plan, machine).step_seconds[0]
    for slow in (SlowRank(3, 2.0), SlowLink((0, 2), 500.0), SlowBody("B[", 2.0), Jitter(0.5)):
        longer = simulate(plan, machine, disturbances=[slow])
        assert longer.step_seconds[0] > 1.05 * alone, slow
        assert len(longer.tracks) == 4
    between, across = ((SlowLink((0, other), 500.0),) for other in (2, 3))
    # Ranks 0 and 3 meet in the sum of the losses only.
    slow, less = (
        simulate(plan, machine, disturbances=d).step_seconds[0] for d in (between, across)
    )
    assert alone < less < slow


@pytest.mark.parametrize("host_computes", [False, True])
def test_a_class_goes_by_the_slowest_of_its_links(host_computes: bool) -> None:
    """Of the pairs (0, 6) to (5, 11) only two stay on a node of 8."""
    plan = layers_plan(4, 4, pp=2, dp=6)
    machine = _machine(host_computes=host_computes, network=Link(1e-4, 1e9))
    classes, ranks = (simulate(plan, machine, by_rank=each) for each in (False, True))
    assert classes.step_seconds == pytest.approx(ranks.step_seconds, rel=0.02)

    def message(timeline: Timeline) -> float:
        tracks = [track for track in timeline.tracks if track.ranks[0] < 6]
        return max(min(s.seconds for s in t if s.label.kind == "send") for t in tracks)

    near = simulate(plan, msgspec.structs.replace(machine, ranks_per_node=12))
    assert message(classes) == pytest.approx(message(ranks), rel=0.02)
    assert message(classes) > 5 * message(near)


def test_groups_of_a_class_are_shifts_of_the_first() -> None:
    mesh = Mesh((("a", 2), ("pp", 3), ("b", 4), ("c", 2)))
    for over in ((), ("a",), ("b", "c"), ("a", "c")):
        group = Group((mesh.at(pp=0), mesh.at(pp=2)), over)
        at = mesh.at(pp=2)
        first, *_ = ranks = list(mesh.ranks(at))
        shifted = {
            tuple(rank + shift for rank in group.ranks(mesh, first))
            for shift in group.shifts(mesh, at)
        }
        assert shifted == {group.ranks(mesh, rank) for rank in ranks}
        assert len(shifted) == len(group.shifts(mesh, at))


def test_every_step_has_its_own_jitter() -> None:
    plan, machine = layers_plan(4, 4, pp=2), _machine()
    steps, again = (
        simulate(plan, machine, steps=4, disturbances=[Jitter(0.5)]).step_seconds for _ in range(2)
    )
    assert len({round(seconds, 9) for seconds in steps}) == 4 and steps == again
    assert simulate(plan, machine, disturbances=[Jitter(0.5)]).step_seconds == steps[:1]


@pytest.mark.parametrize("prefix", ["all_reduce", "send", "recv"])
def test_a_slow_body_may_be_communication(prefix: str) -> None:
    """Both ends of a message are one communication."""
    plan, machine = layers_plan(4, 4, pp=2, dp=2), _machine()
    names = [t.name for c in plan.classes for t in c.tasks if t.kind == prefix]
    alone = simulate(plan, machine).step_seconds[0]
    slow = [SlowBody(name, 1e4) for name in dict.fromkeys(names)]
    assert simulate(plan, machine, disturbances=slow).step_seconds[0] > 1.05 * alone


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SlowRank(4, 2.0), "the plan has no rank 4\n  legal: 0 to 3"),
        (lambda: SlowRank(-1, 2.0), "the plan has no rank -1"),
        (lambda: SlowLink((0, 9), 2.0), "the plan has no rank 9"),
        (lambda: SlowLink((1, 1), 2.0), "ranks 1 and 1 never meet\n  legal: rank 1 meets 0, 2, 3"),
        (lambda: SlowBody("G[PP=1", 2.0), "no body is 'G[PP=1', and no task has a name"),
        (lambda: SlowBody("", 2.0), "no body is ''"),
        (lambda: SlowRank(0, 0.0), "rank 0 takes 0 x as long\n  legal: more than 0"),
        (lambda: SlowLink((0, 1), -2.0), "the link of ranks 0 and 1 takes -2 x as long"),
        (lambda: SlowBody("F", math.inf), "body 'F' takes inf x as long"),
        (lambda: SlowRank(0, math.nan), "rank 0 takes nan x as long"),
        (lambda: Jitter(-0.9), "a jitter of -0.9\n  legal: 0 or more"),
    ],
)
def test_a_disturbance_of_nothing_is_refused(make: Any, error: str) -> None:
    plan = layers_plan(4, 4, pp=2, dp=2)
    with pytest.raises(piper.PiperError) as caught:
        simulate(plan, _machine(), disturbances=[make()])
    assert str(caught.value).startswith(error)


def test_ranks_that_never_meet_have_no_link() -> None:
    """A plan that sums nothing over all ranks: rank 0 has a stage and a replica beside it."""
    plan = layers_plan(4, 4, pp=2, dp=2)
    kept = [
        msgspec.structs.replace(
            part,
            tasks=tuple(t for t in part.tasks if t.kind != "all_reduce" or "loss" not in t.name),
        )
        for part in plan.classes
    ]
    plan = msgspec.structs.replace(plan, classes=tuple(kept))
    with pytest.raises(piper.PiperError, match="ranks 0 and 3 never meet") as caught:
        disturbed(plan, GivenCosts({}), [SlowLink((0, 3), 2.0)])
    assert caught.value.legal == "rank 0 meets 1, 2"


def test_measured_bodies_and_kinds_come_first() -> None:
    plan = layers_plan(4, 4, pp=2)
    body = next(t.body for t in plan.classes[0].tasks if t.kind == "run" and t.phase == "F")
    machine = _machine(bodies={body: 0.125})
    found = {s.label.name: s.seconds for s in simulate(plan, machine).tracks[0]}
    assert found["F[PP=0,MB=1]"] == pytest.approx(0.125)
    assert found["B[PP=0,MB=1]"] < 0.01
