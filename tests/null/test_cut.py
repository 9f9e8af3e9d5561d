"""Automatic stages: where they begin, what they cost, and how the history prints them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.program import Program
from piper.bodies.captured_nodes import numbered
from piper.compiler.source import Cuts
from piper.errors import CutError
from piper.frontend.cut.node_costs import node_costs
from piper.ir.history import history_as_code
from piper.strategies import parallel
from tests.zoo import program_of

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A table, equal blocks, and a head that costs about as much as `head` blocks."""

    def __init__(self, num_layers: int = 12, head: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 8 * WIDTH * head or 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trace(make_model: Any) -> Program:
    batch = torch.zeros(8, 64, dtype=torch.int64)
    return piper.trace(make_model, batch, lambda model, batch: model(batch).mean())


def stages(program: Program, num: int, **options: Any) -> list[list[str]]:
    """The parameters of each stage."""

    def strategy(s: piper.Schedule) -> None:
        s.cut("PP", num, **options)

    applied = program.apply(strategy)
    forwards = [node for node in applied.graph.chunks if node.phase == "F"]
    assert [node.tags for node in forwards] == [(("PP", i),) for i in range(num)]
    values = applied.graph.values
    return [[v for v in node.inputs if values[v].role == "param"] for node in forwards]


def seconds(program: Program, num: int) -> list[float]:
    """The estimated cost of each stage."""
    cut = program.apply(lambda s: s.cut("PP", num)).stages
    assert cut is not None
    capture = program.source.captured(8)
    costs, found = node_costs(capture), [0.0] * num
    for node, position in numbered(capture.graph).items():
        found[cut.stage_of(position)] += costs[node]
    return found


def layers(stage: list[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in stage if name.startswith("layers.")})


def test_equal_layers_make_equal_stages() -> None:
    program = trace(Net)
    found = stages(program, 4)
    assert [layers(stage) for stage in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert "embed.weight" in found[0]
    assert "head.weight" in found[3]
    costs = seconds(program, 4)
    assert max(costs) <= 1.2 * min(costs)
    assert costs[1] == pytest.approx(costs[2], rel=1e-12)


def test_a_costly_head_takes_layers_from_its_stage() -> None:
    program = trace(lambda: Net(12, head=4))
    found = stages(program, 4)
    counts = [len(layers(stage)) for stage in found]
    assert sum(counts) == 12  # whole layers
    assert counts[3] <= 1
    costs = seconds(program, 4)
    assert max(costs) <= 1.1 * sum(costs) / 4


def test_layers_are_opened_where_that_helps_and_only_where_little_crosses() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    class Pairs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Halves() for _ in range(3))

    found = stages(trace(Pairs), 2)
    assert [layers(stage) for stage in found] == [[0, 1], [1, 2]]
    assert "layers.1.first.down.weight" in found[0]
    assert "layers.1.second.norm.weight" in found[1]
    assert "layers.1.second.norm.weight" not in found[0]


def test_as_many_stages_as_modules_and_no_more() -> None:
    program = trace(lambda: Net(1))
    assert len(stages(program, 5)) == 5  # embed, norm, up, down, head
    with pytest.raises(CutError, match="at most 5") as refused:
        stages(program, 6)
    assert refused.value.requirement == 2


def test_costs_that_are_given_decide() -> None:
    program = trace(Net)
    measured = {f"layers.{i}": 9.0 if i == 0 else 1.0 for i in range(12)}
    found = stages(program, 2, costs=measured)
    assert layers(found[0]) == [0, 1]
    assert layers(found[1]) == list(range(2, 12))
    with pytest.raises(CutError, match=r"did you mean 'layers.1'"):
        stages(program, 2, costs={"layer.1": 1.0})
    with pytest.raises(CutError, match="inside of it"):
        stages(program, 2, costs={"layers.1": 1.0, "layers.1.up": 0.5})


def test_changes_in_place_stay_in_one_stage() -> None:
    class InPlace(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            total = torch.zeros_like(x)
            for layer in self.layers[:6]:
                x = layer(x)
                total += x
            for layer in self.layers[6:]:
                x = layer(x)
            return self.head(x + total)

    found = stages(trace(InPlace), 2)
    assert [layers(stage) for stage in found] == [list(range(6)), list(range(6, 12))]


def test_experts_nest_in_their_stage() -> None:
    applied = program_of("untagged").apply(lambda s: s.cut("PP", 4))
    tags = {node.tags for node in applied.graph.chunks}
    assert {pairs for pairs in tags if len(pairs) == 2} == {
        (("PP", i), ("EP", i)) for i in range(4)
    }


def test_stages_begin_at_the_same_nodes_at_every_batch_size() -> None:
    program = trace(Net).apply(lambda s: s.cut("PP", 4))
    whole = program.source.at(8, Cuts(stages=program.stages))[1]
    small = program.source.at(2, Cuts(stages=program.stages))[1]
    assert [c.inputs for c in whole.chunks] == [c.inputs for c in small.chunks]
    assert whole.values[whole.chunks[0].outputs[0]].spec.shape[0] == 8
    assert small.values[small.chunks[0].outputs[0]].spec.shape[0] == 2


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_the_history_is_code_that_gives_the_same_plan(schedule: str) -> None:
    program = program_of("untagged")
    strategy = parallel(pp=2, dp=2, ep=2, schedule=schedule, microbatches=4)
    applied = program.apply(strategy)
    code = history_as_code(applied.history)
    cut = "'PP', 2" if schedule == "1f1b" else "'PP', 4, together=((0, 2), (1, 3))"
    assert f"    s.cut({cut})\n" in code
    names: dict[str, Any] = {}
    exec(code, names)
    again = program.apply(names["strategy"])
    plans = [
        msgspec.structs.replace(found.lower().plan, history=()).content_hash()
        for found in (applied, again)
    ]
    assert plans[0] == plans[1]
    assert [str(record) for record in applied.history] == [str(r) for r in again.history]


def test_tagged_models_are_not_cut() -> None:
    applied = program_of("moe").apply(parallel(pp=2, dp=2, microbatches=2))
    assert "cut" not in {record.call.name for record in applied.history}


def test_costs_count_attention_and_the_backward() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    program = piper.trace(Attention, torch.ones(2, 4096, WIDTH), lambda m, b: m(b).mean())
    capture = program.source.captured(2)
    costs = {node.name: cost for node, cost in node_costs(capture).items()}
    attention = 4 * 2 * 4096 * 4096 * WIDTH / 200e12  # two products
    assert costs["scaled_dot_product_attention"] == pytest.approx(3 * attention)
    assert costs["chunk"] == 0  # a view
