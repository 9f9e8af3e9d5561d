"""Where the sequence is: dims of some inputs in, the dim of each tensor that they carry to out."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from piper.bodies.tensor.forward_code import SEQUENCE
from piper.bodies.tensor.rules.rule_table import Ask, rule_of, tensor_args
from piper.bodies.tensor.stand_ins import STAND_INS
from piper.ir.layouts import REPLICATED, Layout, Split, divides

# The part of a leaf has the dims that the leaf has.
_PASSING = (*STAND_INS, torch.ops.piper.own_leaf.default)


def carried_marks(
    graph: fx.Graph, start: Mapping[fx.Node, Split], size: int
) -> dict[fx.Node, Split]:
    """As rules carry a split of the inputs; where one makes a sum, it ends. Code that was cut along
    another axis before says where the sequence is behind what moves or takes apart its parts."""
    layouts: dict[fx.Node, Layout | list[Layout]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            layouts[node] = start.get(node, REPLICATED)
        elif node.op == "call_function":
            layouts[node] = _carried(node, layouts, size)
            known = node.meta.get(SEQUENCE)
            if start and known is not None and divides(Split(known), node.meta["val"].shape, size):
                layouts[node] = Split(known)
        else:
            layouts[node] = REPLICATED
    return {node: layout for node, layout in layouts.items() if isinstance(layout, Split)}


def _carried(
    node: fx.Node, layouts: dict[fx.Node, Layout | list[Layout]], size: int
) -> Layout | list[Layout]:
    if node.target is operator.getitem:
        source = layouts[node.args[0]]  # type: ignore[index]
        return source[node.args[1]] if isinstance(source, list) else source  # type: ignore[index]
    args = tensor_args(node)
    have = [layout if isinstance(layout := layouts[arg], Split) else REPLICATED for arg in args]
    if all(layout == REPLICATED for layout in have):
        return REPLICATED
    if node.target in _PASSING:
        return have[0]
    known = rule_of(node)
    made = known(Ask(node, args, have, size)).makes if known is not None else REPLICATED
    if isinstance(made, list):
        return [layout if isinstance(layout, Split) else REPLICATED for layout in made]
    return made if isinstance(made, Split) else REPLICATED
