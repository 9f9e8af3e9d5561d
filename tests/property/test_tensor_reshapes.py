"""A split carried through a reshape is that split of the result: for all small shapes."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import fx, nn

from piper.bodies.tensor.parts import local_shape, reshaped
from piper.bodies.tensor.spread import assemble, own_part, padded, spread
from piper.ir.layouts import Split, divides
from tests.tensor_ranks import part, whole_of

LENGTHS = (1, 2, 3, 4, 6)
MOST_ELEMENTS = 48
BLOCKS = (1, 2, 3, (2, 4), (4, 2))
CUTS = (*(Split(0, blocks) for blocks in BLOCKS), Split(0, 2, mirrored=True), Split(0, 4, 0, True))


def _shapes() -> dict[int, list[tuple[int, ...]]]:
    by_size = defaultdict(list)
    for num_dims in (1, 2, 3, 4):
        for shape in product(LENGTHS, repeat=num_dims):
            if math.prod(shape) <= MOST_ELEMENTS:
                by_size[math.prod(shape)].append(shape)
    return by_size


@pytest.mark.parametrize("size", [2, 3])
def test_all_reshapes_of_small_shapes(size: int) -> None:
    carried = 0
    for shapes in _shapes().values():
        for before, after in product(shapes, repeat=2):
            carried += _check_reshape(before, after, size)
    assert carried > 5000


def _check_reshape(before: tuple[int, ...], after: tuple[int, ...], size: int) -> int:
    whole = torch.arange(math.prod(before)).view(before)
    carried = 0
    for dim, cut in product(range(len(before)), CUTS):
        split = cut.along(dim)
        if before[dim] == 1 or not divides(split, before, size):
            continue
        made = reshaped(split, before, after, size)
        if made is None:
            continue
        carried += 1
        assert divides(made, after, size), (before, after, split, made)
        for rank in range(size):
            local = part(whole, split, size, rank).reshape(local_shape(after, made, size))
            expected = part(whole.view(after), made, size, rank)
            assert torch.equal(local, expected), (before, after, split, made)
    return carried


def test_a_split_is_never_lost_by_its_own_shape() -> None:
    for shape in product(LENGTHS, repeat=3):
        for dim, cut in product(range(3), CUTS):
            split = cut.along(dim)
            if shape[dim] > 1 and divides(split, shape, 2) and (shape[dim] // 2) > 0:
                assert reshaped(split, shape, shape, 2) is not None


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (Split(1), (2, 8, 3)),
        (Split(2, 3), (2, 3, 12)),
        (Split(1, 2, mirrored=True), (2, 8, 3)),
        (Split(0, 4, mirrored=True), (16, 3)),
        (Split(0, (4, 8)), (12, 2)),
        (Split(0), (2,)),
    ],
)
def test_code_around_a_communication(split: Split, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    parts = [part(whole, split, 2, rank) for rank in range(2)]
    assert torch.equal(whole_of(parts, split), whole)
    for write, given, expected in (
        (spread, whole, torch.stack(parts)),
        (assemble, torch.stack(parts), whole),
    ):
        graph = fx.Graph()
        graph.output(write(graph, graph.placeholder("x"), shape, split, 2))
        assert torch.equal(_run(graph, given), expected)
    for rank in range(2):
        graph = fx.Graph()
        x, place = graph.placeholder("x"), graph.placeholder("place")
        graph.output(own_part(graph, x, shape, split, 2, place))
        assert torch.equal(_run(graph, whole, torch.tensor([rank])), parts[rank])
        graph = fx.Graph()
        x, place = graph.placeholder("x"), graph.placeholder("place")
        graph.output(padded(graph, x, len(shape), 2, place))
        own = torch.zeros(2, *parts[rank].shape)
        own[rank] = parts[rank]
        assert torch.equal(_run(graph, parts[rank], torch.tensor([rank])), own)


def _run(graph: fx.Graph, *given: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = fx.GraphModule(nn.Module(), graph)(*given)
    return made
