"""Measured costs: a machine decides the order of tasks, the table of auto, and where stages begin."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper import where
from piper.api.program import Program
from piper.cli.main import main
from piper.cost.estimate import NOMINAL, NodeSeconds
from piper.cost.machine import Curve, Linear, Link, Machine
from piper.cost.machine_file import save_machine
from piper.cost.presets import machine
from piper.errors import FileError
from piper.ir.nodes import Chunk, Comm
from piper.plan.tasks import Run
from piper.plan.types import Plan
from piper.schedules import Costs, Table, replay
from piper.sim.simulate import simulate
from piper.strategies import parallel

WIDTH = 8192  # so that the nominal machine, too, takes computation for longer than messages


class Layers(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@functools.cache
def traced(num: int) -> Program:
    return piper.trace(lambda: Layers(num), torch.randn(16, WIDTH), lambda model, x: model(x))


def in_a_circle(s: piper.Schedule) -> None:
    """Two stages a rank, in the order that list scheduling chooses."""
    mesh = s.mesh(pp=2)
    s.cut("PP", 4)
    for stage in range(4):
        s.place(where(PP=stage), mesh.at(pp=stage % 2))
    s.split(where(), "MB", 8)


def bodies_of(plan: Plan, phase: str, stage: int) -> set[str]:
    tasks = [task for found in plan.classes for task in found.tasks if isinstance(task, Run)]
    return {t.body for t in tasks if t.phase == phase and ("PP", stage) in t.tags}


def with_slow_backward(plan: Plan) -> Machine:
    """A machine on which the backward of the middle stages was measured to be slow."""
    slow = bodies_of(plan, "B", 2)
    return msgspec.structs.replace(
        machine("h100"), bodies={b: 0.02 if b in slow else 0.001 for b in plan.bodies}
    )


# The order of tasks


def test_tasks_are_ordered_by_what_they_take_on_a_machine() -> None:
    program = traced(4).apply(in_a_circle)
    nominal = program.lower().plan
    measured = with_slow_backward(nominal)
    plan = program.lower(machine=measured).plan
    before, after = (simulate(found, measured).step_seconds[0] for found in (nominal, plan))
    assert after < 0.75 * before
    assert sorted(t.name for c in plan.classes for t in c.tasks) == sorted(
        t.name for c in nominal.classes for t in c.tasks
    )
    assert program.lower(machine=NOMINAL).plan.to_json() == nominal.to_json()


def test_a_machine_is_given_by_name_by_file_or_as_it_is(tmp_path: Path) -> None:
    program = traced(4).apply(in_a_circle)
    measured = with_slow_backward(program.lower().plan)
    path = tmp_path / "mine.json"
    save_machine(measured, path)
    by_file, as_it_is = program.lower(machine=str(path)), program.lower(machine=measured)
    assert by_file.plan.to_json() == as_it_is.plan.to_json()
    assert program.lower(machine="H100").plan.mesh.size == 2
    with pytest.raises(FileError, match="did you mean 'h100'"):
        program.lower(machine="h10")


def test_a_node_takes_what_its_body_or_kind_or_link_was_measured_to() -> None:
    job = traced(4).apply(parallel(pp=2, dp=4, microbatches=4)).lower()
    graph, flops = job.graph, job.plan.body_flops
    chunk = next(node for node in graph.nodes.values() if isinstance(node, Chunk))
    fast, slow = Link(1e-6, 100e9), Link(5e-6, 10e9)
    found = Machine("mine", {"float32": 1e12}, 1e12, fast, slow, ranks_per_node=4, launch=1e-6)
    work = flops[chunk.body] / 1e12
    touched = sum(graph.values[name].nbytes for name in (*chunk.inputs, *chunk.outputs))
    assert NodeSeconds(graph, flops, found)(chunk) == 1e-6 + max(work, touched / 1e12)
    line = msgspec.structs.replace(found, kinds={"run": Linear(3e-3, 1e-9)})
    assert NodeSeconds(graph, flops, line)(chunk) == 3e-3 + 1e-9 * touched
    measured = msgspec.structs.replace(line, bodies={chunk.body: 0.25})
    assert NodeSeconds(graph, flops, measured)(chunk) == 0.25

    comms = [node for node in graph.nodes.values() if isinstance(node, Comm)]
    send = next(node for node in comms if node.comm == "send")  # from rank 0 to rank 4
    reduce = next(
        node for node in comms if node.comm == "all_reduce" and len(node.group.slices) == 1
    )
    nbytes = {node.name: graph.values[node.inputs[0]].nbytes for node in (send, reduce)}
    seconds = NodeSeconds(graph, flops, found)
    assert seconds(send) == 5e-6 + nbytes[send.name] / 10e9
    assert seconds(reduce) == pytest.approx(6 * 1e-6 + 1.5 * nbytes[reduce.name] / 100e9)
    curve = Curve([(0.0, 7e-6), (1e6, 7e-6 + 1e-4)])
    lines = msgspec.structs.replace(found, exchanges={"all_reduce/4": curve})
    seconds = NodeSeconds(graph, flops, lines)
    assert seconds(reduce) == pytest.approx(7e-6 + 1e-10 * 1.5 * nbytes[reduce.name])


FILE = """
import torch
from tests.null.test_measured_costs import WIDTH, Layers, in_a_circle as strategy

def model(): return Layers(4)
def batch(): return torch.randn(16, WIDTH)
def step(model, x): return model(x)
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
"""


def test_commands_that_lower_take_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = traced(4).apply(in_a_circle)
    measured = with_slow_backward(program.lower().plan)
    mine, file = tmp_path / "mine.json", tmp_path / "file.py"
    save_machine(measured, mine)
    file.write_text(FILE)
    step_seconds = []
    for options in ([], ["--machine", str(mine)]):
        plan = tmp_path / "plan.json"
        assert main(["plan", str(file), "--out", str(plan), *options]) == 0
        capsys.readouterr()
        assert main(["simulate", str(plan), "--machine", str(mine), "--steps", "1", "--json"]) == 0
        step_seconds += json.loads(capsys.readouterr().out)["step_seconds"]
    assert step_seconds[1] < 0.75 * step_seconds[0]
    arguments = ["simulate", str(file), "--machine", str(mine), "--steps", "1", "--json"]
    assert main(arguments) == 0  # lowers for the machine, too
    assert json.loads(capsys.readouterr().out)["step_seconds"] == step_seconds[1:]
    assert main(["train", str(plan), "--steps", "1", "--data", str(file), "--machine", "cpu"]) == 2
    assert "--machine does not go with a saved plan" in capsys.readouterr().err


# The table of auto

PP, MICROBATCHES = 4, 8


def auto(found: Machine | None) -> Program:
    """Four equal stages under the table that the search finds."""
    return traced(PP).apply(
        parallel(pp=PP, microbatches=MICROBATCHES, schedule="auto", machine=found)
    )


def table_of(program: Program) -> Table:
    return program.history[-1].directive.groups


def far_apart(plan: Plan) -> Machine:
    """A machine with slow messages, and a first stage that takes longer than the others."""
    seconds = {"F": 0.001, "BI": 0.001, "BW": 0.0005}
    bodies = {
        body: seconds[phase] * (1.5 if stage == 0 else 1)
        for stage in reversed(range(PP))
        for phase in seconds
        for body in bodies_of(plan, phase, stage)
    }
    nothing = {kind: Linear() for kind in ("add", "update")}
    return msgspec.structs.replace(
        machine("cpu"), bodies=bodies, kinds=nothing, node=Link(2e-3, 1e15), exchange=0.0
    )


def test_auto_goes_by_what_stages_take_on_a_machine() -> None:
    nominal = auto(None)
    measured = far_apart(nominal.lower().plan)
    program = auto(measured)
    job = program.lower(machine=measured)
    assert "schedule auto for cpu along pp" in job.summary()
    assert "schedule auto along pp" in nominal.lower().summary()
    found: list[Costs] = []
    program.apply(lambda s: found.append(s.stage_costs(measured)))
    (costs,) = found
    assert costs.BI == (0.0, 0.001, 0.001, 0.001)  # no gradient of the batch
    assert costs.F[3] == 0.001 and costs.BW[1:] == (0.0005, 0.0005, 0.0005)
    assert costs.BW[0] == 0.00075
    assert costs.comm == 0.002
    # What the search was given makes its table shorter than the one for equal stages.
    spans = [replay(table_of(each), costs).span for each in (nominal, program)]
    assert spans[1] < 0.9 * spans[0]


def test_the_table_of_auto_is_kept_in_the_history() -> None:
    program = auto(machine("h100"))
    names: dict[str, Any] = {}
    exec(program.history_as_code(), names)
    again = traced(PP).apply(names["strategy"])
    assert table_of(again) == table_of(program)
    assert table_of(again).name == "auto for H100"


# What list scheduling expects


@pytest.mark.parametrize(
    "degrees",
    [{"pp": 2, "microbatches": 4}, {"pp": 4, "microbatches": 8, "schedule": "zb_h1"}, {"dp": 2}],
    ids=str,
)
def test_list_scheduling_expects_what_the_simulator_gives(degrees: dict[str, Any]) -> None:
    program = traced(4).apply(parallel(**degrees))
    near = Link(10e-6, 300e9)  # which takes nothing from computation, as list scheduling has it
    found = msgspec.structs.replace(
        machine("h100"), dispatch=0.0, exchange=0.0, node=near, network=near
    )
    expected, plan = program.expected(machine=found), program.lower(machine=found).plan
    simulated = simulate(plan, found)
    assert expected.directives == simulated.directives
    assert expected.num_spans == simulated.num_spans
    for mine, theirs in zip(expected.tracks, simulated.tracks, strict=True):
        assert mine.ranks == theirs.ranks
        spans = {span.label.name: span for span in theirs}
        for span in mine:
            other = spans[span.label.name]
            assert msgspec.structs.replace(other.label, meeting=span.label.meeting) == span.label
            if span.label.kind in ("run", "add", "send", "recv"):
                assert span.end == pytest.approx(other.end, rel=1e-12)
    # Not equal: the sum of the loss, which comes last in the plan, and updates, whose parameters a node
    # has before and after, but a task in one place.
    assert expected.step_seconds[0] == pytest.approx(simulated.step_seconds[0], rel=0.05)


def test_a_slow_body_is_expected_to_be_slow() -> None:
    program = traced(4).apply(in_a_circle)
    measured = with_slow_backward(program.lower().plan)
    spans = [span for track in program.expected(machine=measured).tracks for span in track]
    slow = [span.seconds for span in spans if span.label.name.startswith("B[PP=2")]
    assert slow == pytest.approx([0.02] * 8)
