"""One recording serves all batch sizes: what it gives at a size is what a recording there gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import dense, moe, moe_lm
from torch import Tensor, fx, nn

import piper
from piper.bodies.captured_nodes import value_of
from piper.bodies.leaves import batch_leaves, tensors_in
from piper.compiler import captures
from piper.compiler.captures import Captures
from piper.frontend.capture.capture import Capture, Recording, finish, record
from piper.frontend.traced import cut_program
from tests.zoo import CASES

Step = Callable[[nn.Module, Any], Any]
EXAMPLES = {e.__name__: (e.model, e.batch(), e.step) for e in (dense, moe, moe_lm)}
PROGRAMS = {name: (case.model, case.batch(0), case.step) for name, case in CASES.items()}


def nodes_of(capture: Capture, *, names: bool) -> list[Any]:
    """Everything that bodies are made of; nodes by number, or by name."""
    number = {node: index for index, node in enumerate(capture.graph.nodes)}

    def plain(value: Any) -> Any:
        return fx.map_arg(value, lambda node: node.name if names else number[node])

    return [
        (
            node.op,
            str(node.target),
            repr(plain(node.args)),
            repr(plain(node.kwargs)),
            node.meta.get("custom"),
            [(t.shape, t.dtype) for t in tensors_in(value_of(node))],
            node in capture.facts.flowing,
            sorted(map(str, capture.facts.random.get(node, ()))),
        )
        for node in capture.graph.nodes
    ]


def _keys(capture: Capture) -> list[str]:
    return [chunk.code.key for chunk in cut_program(capture, stages="PP").chunks]


@pytest.mark.parametrize(
    ("name", "training", "dtype"),
    [(name, True, "") for name in (*EXAMPLES, *PROGRAMS)]
    + [(name, False, "") for name in (*EXAMPLES, "dropout")]
    + [(name, True, "bfloat16") for name in EXAMPLES],
)
def test_a_derived_capture_is_a_recorded_one(name: str, training: bool, dtype: str) -> None:
    program = (EXAMPLES | PROGRAMS)[name]
    size = next(iter(batch_leaves(program[1]).values())).shape[0]
    kind: dict[str, Any] = {"dtype": dtype, "training": training, "float32_operators": bool(dtype)}
    whole = record(*program, rows=size, any_rows=True, **kind)
    sizes = [rows for rows in (size, 2 * size, 3, 2) if whole.holds_at(rows)]
    assert {size, 2 * size, 2} <= set(sizes)
    for rows in (size, 2):
        derived = finish(whole, rows)
        recorded = finish(record(*program, rows=rows, any_rows=False, **kind), rows)
        assert nodes_of(derived, names=False) == nodes_of(recorded, names=False)
        assert _keys(derived) == _keys(recorded)


class Counting(nn.Module):
    """Every way in which a number of rows gets into code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        x = self.linear(x) / rows + torch.arange(rows).unsqueeze(1) / (2.0 * rows - 1)
        x = x.view(rows * 2, width // 2).reshape(x.size()) * x.numel() ** 0.5
        weights = torch.full((rows, rows), 1 / len(x)) + torch.tensor(float(rows))
        halves = torch.cat([x[: rows // 2], x[rows // 2 :].expand(rows - rows // 2, width)])
        return (weights @ halves)[..., -1 - (width // 3) :] + torch.ones_like(x)[0, : width // 2]


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum() / (batch.shape[0] * 3)


def test_numbers_of_rows_in_code_are_those_of_the_size() -> None:
    program = (Counting, torch.ones(8, 6), _mean)
    whole = record(*program, rows=8, any_rows=True)
    for rows in (8, 16, 6):
        assert whole.holds_at(rows)
        derived = finish(whole, rows)
        recorded = finish(record(*program, rows=rows, any_rows=False), rows)
        assert nodes_of(derived, names=False) == nodes_of(recorded, names=False)
        assert f"{rows * 2}, 3" in str(nodes_of(derived, names=True))


class Looking(nn.Module):
    """Code that takes another way for few rows, or for one number of them only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.way == "few" and x.shape[0] <= 4:
            return x.relu()
        if self.way == "each":
            return torch.stack([row.tanh() for row in x])
        if self.way == "odd" and x.shape[0] % 2:
            return x.exp()
        return x.sigmoid() + torch.zeros(8, 1) if self.way == "eight" else x.sigmoid()


@pytest.mark.parametrize(
    ("way", "holding"),
    [("few", [5, 16]), ("each", []), ("odd", [2, 4, 16]), ("eight", []), ("", [2, 4, 5, 16])],
)
def test_code_that_looks_at_the_number_is_recorded_again(way: str, holding: list[int]) -> None:
    whole = record(lambda: Looking(way), torch.ones(8, 6), _mean, rows=8, any_rows=True)
    assert [rows for rows in (1, 2, 4, 5, 8, 16) if whole.holds_at(rows)] == sorted([*holding, 8])


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows of each recording."""
    noted: list[int] = []

    def noting(*program: Any, **options: Any) -> Recording:
        noted.append(options["rows"])
        return record(*program, **options)

    monkeypatch.setattr(captures, "record", noting)
    return noted


def test_the_demo_is_recorded_once(recordings: list[int]) -> None:
    """From trace through the evaluation's plan."""
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    strategy = piper.strategies.parallel(
        pp=2, dp=2, ep=2, zero=2, schedule="dualpipev", microbatches=4
    )
    job = program.apply(strategy).lower(optimizer=moe_lm.optimizer, clip=1.0)
    assert not job.evaluation().plan.train
    assert len(recordings) == 1


def test_what_is_recorded_again_has_the_same_names(recordings: list[int]) -> None:
    """Also where the one recording has gaps between its names: a size was a node there."""
    program = Captures(
        Counting,
        torch.ones(8, 6),
        _mean,
        batch_size=8,
        dtype="",
        training=True,
        frozen=frozenset(),
    )
    whole = [node.name for node in program.at(8).graph.nodes]
    assert [node.name for node in program.at(4).graph.nodes] == whole
    assert recordings == [8]
    assert [node.name for node in program.at(1).graph.nodes] == whole
    assert recordings == [8, 1]
    assert [program.at(rows) for rows in (8, 4, 1)] and recordings == [8, 1]
