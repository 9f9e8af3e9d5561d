"""cut(costs="measure"): modules are run, stages balanced by what they take, and the history keeps it."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.api.program import Program
from piper.cli.main import main
from piper.errors import CutError
from piper.frontend.capture.capture import Capture, value_of
from piper.frontend.cut.unit_times import unit_times
from piper.frontend.cut.units import Units
from piper.ir.history import history_as_code

WIDTH, ROWS = 64, 8


class Dense(nn.Module):
    """Two large products: many flops, few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chatty(nn.Module):
    """Many small operators: next to no flops."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = x[:, :1]
        for _ in range(160):
            some = torch.tanh(some * self.scale)
        return x + some.sum()


class Net(nn.Module):
    """Small operators at the start, flops behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chatty(), Chatty(), *(Dense() for _ in range(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def program() -> Program:
    return piper.trace(Net, torch.randn(ROWS, WIDTH), lambda model, x: model(x))


def cut(**options: Any) -> Program:
    return program().apply(lambda s: s.cut("PP", 2, **options))


def stages(found: Program) -> list[list[int]]:
    """The layers of each stage."""
    values = found.graph.values
    forwards = [node for node in found.graph.chunks if node.phase == "F"]
    return [
        sorted({int(v.split(".")[1]) for v in node.inputs if values[v].role == "param"})
        for node in forwards
    ]


def imbalance(layers: list[list[int]]) -> float:
    """The largest stage by the mean, as the layers themselves take it, forward and backward."""
    net, x = Net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    rounds = [[_seconds(layer, x) for layer in net.layers] for _ in range(20)]
    times = [min(found) for found in zip(*rounds, strict=True)]
    sums = [sum(times[i] for i in stage) for stage in layers]
    return max(sums) / (sum(sums) / len(sums))


def _seconds(layer: nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - begin


@functools.cache
def measured() -> Program:
    return cut(costs="measure")


def test_stages_are_balanced_by_what_modules_take() -> None:
    by_flops, by_time = stages(cut()), stages(measured())
    assert by_flops == [[0, 1, 2, 3], [4, 5]]  # two of four dense layers in each
    assert by_time == [[0], [1, 2, 3, 4, 5]]
    assert imbalance(by_time) < 1.4 < 1.5 < imbalance(by_flops)


def test_the_history_keeps_what_was_measured_and_cuts_the_same_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("it measures again")

    found = measured()
    (record,) = found.history
    costs = msgspec.to_builtins(record.directive)["costs"]
    assert costs["layers.2.up"] == costs["layers.3.up"] > 0  # equal code is measured once
    assert str(record) == f"s.cut('PP', 2, costs={costs})"
    monkeypatch.setattr("piper.frontend.cut.stage_choice.unit_times", never)
    names: dict[str, Any] = {}
    exec(history_as_code(found.history), names)
    for again in (program().apply(names["strategy"]), program().apply(found.history)):
        assert again.stages == found.stages
        plans = [msgspec.structs.replace(p.lower().plan, history=()) for p in (found, again)]
        assert plans[0].to_json() == plans[1].to_json()


def test_fewer_rows_are_measured_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def noting(capture: Capture, *given: Any, **options: Any) -> list[float]:
        rows.append({value_of(n).shape[0] for n, o in capture.origins.items() if o.role == "batch"})
        return unit_times(capture, *given, **options)

    monkeypatch.setattr("piper.frontend.cut.stage_choice.unit_times", noting)
    (few,) = cut(costs="measure", rows=2).history
    cut(costs="measure")
    assert rows == [{2}, {ROWS}]
    assert few.directive.rows is None  # the costs say it all
    with pytest.raises(CutError, match="rows=4"):
        cut(rows=4)


def test_a_unit_that_cannot_run_alone_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = program().source.captured(ROWS)
    nodes = [node for node in capture.graph.nodes if node.op == "call_function"]
    leaves = Units(nodes).leaves()
    estimated = [1.0] * len(nodes)
    refused = next(unit for unit in leaves if unit.path == "layers.3.up")
    broken = nodes[refused.start]
    monkeypatch.setattr(broken, "target", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match=r"layers.3.up cannot be measured .* division by zero"):
        times = unit_times(capture, nodes, leaves, estimated, device="cpu")
    others = [t for t, unit in zip(times, leaves, strict=True) if unit is not refused]
    sizes = [unit.stop - unit.start for unit in leaves if unit is not refused]
    mine = times[leaves.index(refused)]
    assert mine == pytest.approx((refused.stop - refused.start) * sum(others) / sum(sizes))


def test_changes_in_place_integers_and_casts_are_measured() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(8, 16), nn.BatchNorm1d(16)
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(16, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.norm(self.table(tokens)))
            x[:, 0] = 0.0
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.out(x)
            return nn.functional.cross_entropy(logits.float(), tokens.clamp(max=3))

    odd = piper.trace(Odd, torch.randint(8, (32,)), lambda model, tokens: model(tokens))
    (record,) = odd.apply(
        lambda s: s.cut("PP", 2, costs="measure")
    ).history  # no warning: errors here
    assert set(record.directive.costs) == {"table", "norm", "drop", "out"}
    assert min(record.directive.costs.values()) > 0


def test_ranks_of_torchrun_do_not_measure_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(CutError, match="history_as_code"):
        cut(costs="measure")


def test_the_command_line_can_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "examples/vocabulary.py", "--pp", "2", "--microbatches", "4", "--json"]
    assert main([*command, "--costs", "measure"]) == 0
    measured = json.loads(capsys.readouterr().out)["directives"][1]
    assert measured.startswith("s.cut('PP', 2, costs={") and "'head': " in measured
    assert main(command) == 0
    assert "costs" not in json.loads(capsys.readouterr().out)["directives"][1]


@pytest.mark.parametrize(
    "command", (["examples/vocabulary.py", "--dp", "2"], ["examples/dense.py", "--pp", "2"])
)
def test_costs_that_cut_nothing_are_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *command, "--costs", "measure"]) == 2
    said = capsys.readouterr().err
    assert "--costs measure, but no stages are cut" in said
    assert "legal: --pp 2 or more and a model without PP tags, or no costs" in said


def test_other_words_are_refused() -> None:
    with pytest.raises(CutError, match='legal: "measure"'):
        cut(costs="measured")
