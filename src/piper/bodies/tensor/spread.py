"""Code around a change of layout: a tensor in, a stack with one entry per rank out; and back.

All communication works along a new dim 0. The code before and behind it belongs to the pieces, which
AOTAutograd differentiates, so that a collective only ever sees flat memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piper.bodies.tensor.parts import dim_of, local_shape
from piper.ir.layouts import Split

aten = torch.ops.aten


def spread(
    graph: fx.Graph, whole: fx.Node, shape: Sequence[int], split: Split, size: int
) -> fx.Node:
    """`shape` -> [size, *local]: entry r is rank r's part."""
    dim = dim_of(split)
    if isinstance(split.blocks, tuple):
        return _each_block(graph, whole, shape, split, size, spread, split.blocks, (dim, dim + 1))
    length = shape[dim] // split.blocks // size
    cut = [*shape[:dim], split.blocks, size, length, *shape[dim + 1 :]]
    ranks = _call(graph, aten.reshape.default, whole, cut)
    if split.mirrored:
        ranks = _mirrored(graph, ranks, cut, dim)
    ranks = _call(graph, aten.movedim.int, ranks, dim + 1, 0)
    return _call(graph, aten.reshape.default, ranks, [size, *local_shape(shape, split, size)])


def assemble(
    graph: fx.Graph, stack: fx.Node, shape: Sequence[int], split: Split, size: int
) -> fx.Node:
    """[size, *local] -> `shape`: the inverse of `spread`."""
    dim = dim_of(split)
    if isinstance(split.blocks, tuple):
        lengths = [block // size for block in split.blocks]
        return _each_block(graph, stack, shape, split, size, assemble, lengths, (dim + 1, dim))
    length = shape[dim] // split.blocks // size
    cut = [size, *shape[:dim], split.blocks, length, *shape[dim + 1 :]]
    ranks = _call(graph, aten.reshape.default, stack, cut)
    ranks = _call(graph, aten.movedim.int, ranks, 0, dim + 1)
    if split.mirrored:
        ranks = _mirrored(graph, ranks, [*cut[1 : dim + 2], size, *cut[dim + 2 :]], dim)
    return _call(graph, aten.reshape.default, ranks, list(shape))


def _mirrored(graph: fx.Graph, ranks: fx.Node, shape: Sequence[int], dim: int) -> fx.Node:
    """[.., blocks, ranks, ..] with every second block from last to first: its own inverse."""
    pairs = [*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :]]
    paired = _call(graph, aten.reshape.default, ranks, pairs)
    ahead, back = (_call(graph, aten.select.int, paired, dim + 1, which) for which in (0, 1))
    back = _call(graph, aten.flip.default, back, [dim + 1])
    both = _call(graph, aten.stack.default, [ahead, back], dim + 1)
    return _call(graph, aten.reshape.default, both, list(shape))


def own_part(
    graph: fx.Graph,
    whole: fx.Node,
    shape: Sequence[int],
    split: Split,
    size: int,
    place: fx.Node,
) -> fx.Node:
    """The part of rank `place` of a tensor that is whole here."""
    return _entry(graph, spread(graph, whole, shape, split, size), place)


def padded(graph: fx.Graph, part: fx.Node, dims: int, size: int, place: fx.Node) -> fx.Node:
    """A part of so many dims -> [size, *local]: zeros but for the entry at `place`."""
    # The device is named: bodies replace it by their own.
    ranks = graph.call_function(aten.arange.default, (size,), {"device": torch.device("cpu")})
    here = _call(graph, aten.eq.Tensor, ranks, place)
    here = _call(graph, aten.reshape.default, here, [size, *[1] * dims])
    return _call(
        graph, aten.where.ScalarOther, here, _call(graph, aten.unsqueeze.default, part, 0), 0
    )


def _entry(graph: fx.Graph, stack: fx.Node, place: fx.Node) -> fx.Node:
    return _call(
        graph, aten.squeeze.dim, _call(graph, aten.index_select.default, stack, 0, place), 0
    )


def _each_block(
    graph: fx.Graph,
    tensor: fx.Node,
    shape: Sequence[int],
    split: Split,
    size: int,
    one_block: Callable[[fx.Graph, fx.Node, Sequence[int], Split, int], fx.Node],
    lengths: Sequence[int],
    dims: tuple[int, int],
) -> fx.Node:
    """Blocks of unequal sizes one by one: `lengths` of them along dims[0], joined along dims[1]."""
    assert isinstance(split.blocks, tuple)
    dim = dim_of(split)
    blocks = _call(graph, aten.split_with_sizes.default, tensor, list(lengths), dims[0])
    done = []
    for index, length in enumerate(split.blocks):
        block = _call(graph, operator.getitem, blocks, index)
        of_block = [*shape[:dim], length, *shape[dim + 1 :]]
        done.append(one_block(graph, block, of_block, Split(dim), size))
    return _call(graph, aten.cat.default, done, dims[1])


def _call(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    return graph.call_function(target, args)
