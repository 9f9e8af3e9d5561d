"""Finer chunks: where pieces begin, what shares a body, what a cut may not separate."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.compiler.source import Cuts
from piper.errors import PlanError
from piper.frontend.cut.regions import is_code
from piper.frontend.cut.units import inseparable
from piper.frontend.traced import TracedChunk
from piper.ir.form.byte_sizes import parse_size

WIDTH = 6
LINEAR = (WIDTH * WIDTH + WIDTH) * 4  # bytes of one Linear
WHOLE = 10**9


class Block(nn.Module):
    """Three linears in two children, with code of its own around them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x * 2)
        return x + torch.tanh(self.mlp(x))


class Net(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x) * 0.5
        return self.leave(x)


def chunks(make_model: Any, size: int) -> tuple[TracedChunk, ...]:
    program = piper.trace(make_model, torch.ones(8, WIDTH), lambda m, batch: m(batch).mean())
    _, traced = program.source.at(8, Cuts(pieces=((0, size),)))
    return traced.chunks


def params(chunk: TracedChunk) -> list[str]:
    return [name for name in chunk.inputs if name.endswith(("weight", "bias"))]


def test_a_chunk_within_the_size_stays_whole() -> None:
    (only,) = chunks(Net, WHOLE)
    assert only.parts == 1
    assert only.whole == 0


def test_layers_are_pieces_and_equal_layers_share_a_body() -> None:
    found = chunks(Net, 3 * LINEAR)
    assert [sorted({name.rpartition(".")[0] for name in params(c)}) for c in found] == [
        ["enter"],
        *(
            [f"layers.{i}.attention.0", f"layers.{i}.attention.1", f"layers.{i}.mlp"]
            for i in range(4)
        ),
        ["leave"],
    ]
    assert [(c.part, c.parts, c.whole) for c in found] == [(i, 6, 0) for i in range(6)]
    assert len({c.code.key for c in found[1:5]}) == 1
    assert all(len(c.outputs) == 1 for c in found)


def test_neighbours_of_one_parent_are_packed() -> None:
    found = chunks(Net, 6 * LINEAR)
    assert [len(params(c)) for c in found] == [2, 12, 12, 1]
    assert found[1].code.key == found[2].code.key


def test_a_layer_above_the_size_is_opened() -> None:
    found = chunks(Net, 2 * LINEAR)
    assert [len(params(c)) for c in found] == [2, *[4, 2] * 4, 1]
    assert len({c.code.key for c in found}) == 4


def test_a_module_above_the_size_has_its_own_piece() -> None:
    found = chunks(Net, 1)
    assert [len(params(c)) for c in found] == [2, *[2, 2, 2] * 4, 1]
    first = [node.name for node in found[1].code.graph.nodes if node.op == "call_function"]
    assert first[0].startswith("mul")  # the block's own code at its start


def test_code_without_modules_stays_one_piece() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.b_weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a_weight @ self.b_weight

    assert len(chunks(Flat, 1)) == 1


def test_changes_in_place_are_not_separated() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            y = self.b(x)
            z = self.act(y)
            y.mul_(2)
            return self.c(y) + z

    found = chunks(InPlace, 1)
    assert [len(params(c)) for c in found] == [2, 2, 2]

    class Early(InPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffer = self.a(x).detach().clone()
            y = self.b(x)
            buffer += y.detach()
            return self.c(y) + buffer

    found = chunks(Early, 1)
    assert [len(params(c)) for c in found] == [4, 2]


def test_parts_of_a_tuple_stay_with_it() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.c = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = self.a(x).chunk(2, -1)
            x = self.b(pair[0])
            return self.c(x) + pair[1]

    program = piper.trace(Halves, torch.ones(8, WIDTH), lambda m, batch: m(batch).mean())
    capture = program.source.captured(8)
    nodes = [node for node in capture.graph.nodes if is_code(node)]
    parts = [i for i, node in enumerate(nodes) if node.target is operator.getitem]
    assert len(parts) == 2
    assert inseparable(nodes, capture) == set(range(parts[0], parts[1] + 1))


def test_a_shared_module_counts_where_it_is_read() -> None:
    class Shared(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.enter(layer(x))
            return x

    found = chunks(lambda: Shared(2), 3 * LINEAR)
    assert [len(params(c)) for c in found] == [6, 2, 6, 2]


@pytest.mark.parametrize(
    ("size", "wanted"), [(7, 7), ("64KiB", 2**16), ("25 MiB", 25 * 2**20), ("1.5GB", 15 * 10**8)]
)
def test_sizes(size: int | str, wanted: int) -> None:
    assert parse_size(size) == wanted


@pytest.mark.parametrize("size", [0, -1, True, "MiB", "25 MIB", "0KiB", 2.5])
def test_no_sizes(size: Any) -> None:
    with pytest.raises(PlanError, match="is no size"):
        parse_size(size)


def test_the_graph_is_refined_only_when_it_is_lowered() -> None:
    program = piper.trace(Net, torch.ones(8, WIDTH), lambda m, batch: m(batch).mean())

    def strategy(s: piper.Schedule) -> None:
        s.mesh(dp=2)
        s.replicate(piper.where(), over="dp", bucket_size=3 * LINEAR)
        s.split(piper.where(), "MB", 2)
        s.order([piper.where(MB=0), piper.where(MB=1)])

    applied = program.apply(strategy)
    assert len(applied.graph.chunks) == 4
    assert str(applied.history[1]).endswith(f"bucket_size={3 * LINEAR})")
    physical = applied.lower().graph
    assert len(physical.chunks) == 6 * 4
    assert "F[.3,MB=1]" in physical.nodes
    ordered = {e.origin for e in physical.edges if not e.after.startswith("total.")}
    assert ordered == {3}  # the order's own line
