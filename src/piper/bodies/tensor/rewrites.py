"""Operators whose form over ranks is several operators: a node in, the nodes that replace it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piper.bodies.operators import bound_arguments
from piper.bodies.tensor.forward_code import FLOWS
from piper.bodies.tensor.rules.losses import MEAN, SUM, vocabulary_loss, vocabulary_terms
from piper.bodies.tensor.rules.rule_table import aten, operator_name
from piper.ir.layouts import Layout, Split

Marks = dict[fx.Node, Split]


def rewritten(
    node: fx.Node, args: Sequence[fx.Node], have: Sequence[Layout], marks: Marks, size: int
) -> list[fx.Node] | None:
    """The nodes that stand for `node` now, in order; None if it stays."""
    name = operator_name(node)
    if name == "linear" and len(args) == 3 and isinstance(have[1], Split) and have[1].dim == 1:
        return _bias_behind(node, aten.linear.default, (args[0], args[1]), args[2], marks)
    if name == "addmm" and isinstance(have[2], Split):
        given = bound_arguments(node.target, node.args, node.kwargs)
        if given["alpha"] == given["beta"] == 1:
            return _bias_behind(node, aten.mm.default, (args[1], args[2]), args[0], marks)
    if name == "cross_entropy_loss" and len(args) == 2:
        return _cross_entropy(node, args, have[0], size)
    return None


def _bias_behind(
    node: fx.Node,
    product: Callable[..., Any],
    args: tuple[fx.Node, fx.Node],
    bias: fx.Node,
    marks: Marks,
) -> list[fx.Node]:
    """Of a matrix that is cut by row, the bias is added to the sum, once."""
    value = node.meta["val"]
    matrix = inserted(node, product, args, value)
    total = inserted(node, aten.add.Tensor, (matrix, bias), value)
    if node in marks:
        marks[matrix] = marks[total] = marks[node]
    return replaced(node, [matrix, total])


def _cross_entropy(
    node: fx.Node, args: Sequence[fx.Node], logits: Layout, size: int
) -> list[fx.Node] | None:
    given = bound_arguments(node.target, node.args, node.kwargs)
    value = node.meta["val"]
    shape = args[0].meta["val"].shape
    if len(shape) != 2 or not isinstance(logits, Split):
        return None
    if args[1].meta["val"].is_floating_point():  # probabilities of classes, not their numbers
        return None
    if logits == Split(1) and not given["label_smoothing"]:
        terms_value = args[0].meta["val"].new_empty(2 * size, shape[0])
        terms = inserted(node, vocabulary_terms, tuple(args), terms_value)
        loss = (terms, args[1], given["ignore_index"], given["reduction"])
        return replaced(node, [terms, inserted(node, vocabulary_loss, loss, value)])
    if logits.dim == 0 and given["reduction"] == MEAN:
        ignored, smooth = given["ignore_index"], given["label_smoothing"]
        total = inserted(node, node.target, (*args, None, SUM, ignored, smooth), value)
        target = args[1].meta["val"]
        counted = inserted(node, aten.ne.Scalar, (args[1], ignored), target.to(torch.bool))
        count = inserted(node, aten.sum.default, (counted,), target.sum())
        return replaced(
            node, [total, counted, count, inserted(node, aten.div.Tensor, (total, count), value)]
        )
    return None


def inserted(node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A call before a node, for which it stands, or for a part of it."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    sources = [arg for arg in args if isinstance(arg, fx.Node)]
    flows = value.is_floating_point() and any(source.meta.get(FLOWS) for source in sources)
    new.meta = {**node.meta, "val": value, FLOWS: bool(node.meta.get(FLOWS)) and flows}
    return new


def replaced(node: fx.Node, by: list[fx.Node]) -> list[fx.Node]:
    """The nodes, whose last one is read instead of `node`."""
    node.replace_all_uses_with(by[-1])
    node.graph.erase_node(node)
    return by
