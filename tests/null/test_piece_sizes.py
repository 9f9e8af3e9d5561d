"""How large the pieces are that chunks with copies are cut into, where nobody says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper import where
from piper.directives.schedule import Schedule
from piper.ir.graph import Graph
from piper.passes import piece_sizes as rules
from piper.passes.piece_sizes import piece_sizes
from tests.zoo import program_of

MIB = 1 << 20


def _graph(**options: Any) -> Graph:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(dp=2)
        s.place(where(), mesh.at())
        s.replicate(where(), over="dp", **options)

    return program_of("dense").apply(strategy).graph


def _bytes(graph: Graph, chunk: int) -> int:
    (node,) = (n for n in graph.chunks if n.chunk == chunk and n.phase == "F")
    values = (graph.values[name] for name in node.inputs)
    return sum(value.nbytes for value in values if value.role == "param")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's models are."""
    monkeypatch.setattr(rules, "SMALLEST", 64)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_chunks_are_cut_into_eighths(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph(zero=zero)
    sizes = piece_sizes(graph)
    assert sizes and all(size == _bytes(graph, chunk) // 8 for chunk, size in sizes.items())
    assert piece_sizes(graph, overlap=False) == (sizes if zero > 1 else {})
    monkeypatch.setattr(rules, "SMALLEST", MIB)
    assert piece_sizes(graph) == {}


def test_what_ranks_do_not_keep_whole_comes_in_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "LARGEST", 100)
    for zero, bound in ((0, False), (1, False), (2, True), (3, True)):
        assert all((size == 100) == bound for size in piece_sizes(_graph(zero=zero)).values())


def test_parameters_count_in_the_dtype_that_they_are_cast_to() -> None:
    graph = _graph(zero=2)  # the models are float64
    whole, halves = piece_sizes(graph), piece_sizes(graph, dtype="float32")
    assert whole and halves == {chunk: size // 2 for chunk, size in whole.items()}


def test_a_size_that_is_said_is_taken() -> None:
    assert set(piece_sizes(_graph(zero=2, bucket_size=300)).values()) == {300}


def test_norms_go_with_the_matrices_behind_them() -> None:
    """A matrix is beyond the size of a bucket anyway; a norm alone would be a message of little else
    than latency."""

    def model() -> nn.Module:
        layers = ((nn.LayerNorm(128), nn.Linear(128, 128, bias=False)) for _ in range(4))
        return nn.Sequential(*(module for layer in layers for module in layer))

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(dp=2)
        s.place(where(), mesh.at())
        s.replicate(where(), over="dp", zero=1, bucket_size="32KiB")

    program = piper.trace(model, torch.zeros(4, 128), lambda model, x: model(x).square().mean())
    plan = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3)).plan
    layers = [(f"{n}.weight", f"{n}.bias", f"{n + 1}.weight") for n in range(0, 8, 2)]
    assert sorted(tuple(sorted(b.params)) for b in plan.buckets) == sorted(
        tuple(sorted(layer)) for layer in layers
    )
