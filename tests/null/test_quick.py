"""Bodies call operators by their shortest way: the same bits, in the same layout."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from piper.bodies.files.codec import decode, encode, load
from piper.bodies.files.quick import _FUNCTIONS, _METHODS

aten = torch.ops.aten
X, Y, Z = torch.randn(3, 4, 6), torch.randn(4, 6), torch.randn(6, 4)
ARGUMENTS = {
    aten.t.default: (Y,),
    aten.transpose.int: (X, 0, 2),
    aten.permute.default: (X, [2, 0, 1]),
    aten.unsqueeze.default: (X, 1),
    aten.cat.default: ([X, X], 1),
    aten.mm.default: (Y, Z),
    aten.bmm.default: (X, X.mT.contiguous()),
    aten.addmm.default: (Y[0, :4], Y, Z),
    aten.native_layer_norm.default: (X, [6], Y[0], Y[1], 1e-5),
    aten.view.default: (X, [12, -1]),
    aten._unsafe_view.default: (X, [12, 6]),
    aten.expand.default: (Y, [3, -1, -1]),
}
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def _body(make: Callable[[fx.Graph], object]) -> str:
    graph = fx.Graph()
    graph.output(make(graph))
    return encode(graph)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A result that lies alone in its memory, as those of bodies do; it has the strides of the node."""
    return graph.call_function(aten.clone.default, (node,))


def _equal(text: str, *inputs: Tensor) -> None:
    for found, wanted in zip(load(text)([*inputs]), decode(text)(*inputs), strict=True):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())


TARGETS = [target for target in (*_FUNCTIONS, *_METHODS) if target is not torch.random.manual_seed]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_way_leads_to_the_same_result(target: torch._ops.OpOverload) -> None:
    given = ARGUMENTS.get(target, (X, Y.half()) if target in BINARY else (X,))
    tensors = [a for part in given for a in (part if isinstance(part, list) else [part])]
    inputs = [a for a in tensors if isinstance(a, Tensor)]

    def make(graph: fx.Graph) -> object:
        nodes = iter([graph.placeholder(f"a{i}") for i in range(len(inputs))])
        args = torch.utils._pytree.tree_map(
            lambda a: next(nodes) if isinstance(a, Tensor) else a, given
        )
        result = graph.call_function(target, args)
        if target is aten.native_layer_norm.default:
            return tuple(graph.call_function(operator.getitem, (result, i)) for i in range(3))
        return (_copy(graph, result),)

    text = _body(make)
    code = load(text).__self__.code.replace("torch.ops.aten.clone.default", "")  # type: ignore[attr-defined]
    assert "torch.ops" not in code
    _equal(text, *inputs)


def test_views_of_all_there_is_are_gone() -> None:
    def make(graph: fx.Graph) -> object:
        y, z = graph.placeholder("y"), graph.placeholder("z")
        twice = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (y,)),))
        alone = graph.call_function(aten.detach.default, (twice,))
        return (graph.call_function(aten.mm.default, (alone, z)), _copy(graph, twice))

    text = _body(make)
    code = load(text).__self__.code  # type: ignore[attr-defined]
    assert "detach" not in code and "torch.t(" not in code
    _equal(text, Y, Z)


def test_a_view_that_others_read_stays() -> None:
    def make(graph: fx.Graph) -> object:
        once = graph.call_function(aten.t.default, (graph.placeholder("y"),))
        twice = graph.call_function(aten.t.default, (once,))
        return (_copy(graph, once), _copy(graph, twice))

    text = _body(make)
    assert load(text).__self__.code.count("torch.t(") == 1  # type: ignore[attr-defined]
    _equal(text, Y)


def test_numbers_stay_with_their_overload() -> None:
    def make(graph: fx.Graph) -> object:
        return (graph.call_function(aten.add.Tensor, (graph.placeholder("y"), 2)),)

    text = _body(make)
    assert "torch.ops.aten.add.Tensor" in load(text).__self__.code  # type: ignore[attr-defined]
    _equal(text, Y)


def test_initial_values_are_drawn_alike() -> None:
    def make(graph: fx.Graph) -> object:
        graph.call_function(torch.random.manual_seed, (graph.placeholder("seed"),))
        empty = graph.call_function(aten.empty.memory_format, ([3, 4],))
        return (graph.call_function(aten.normal_.default, (empty,)),)

    text = _body(make)
    assert "torch.random" not in load(text).__self__.code  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        _equal(text, 7)  # type: ignore[arg-type]
