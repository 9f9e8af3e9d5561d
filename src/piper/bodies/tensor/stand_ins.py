"""Functions that stand in a graph for code that differs by layout, with their rules."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from piper.bodies.tensor.parts import dealt_blocks, dim_of
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, aten, rule
from piper.ir.layouts import REPLICATED, Split

OWN_SPLIT = "piper_own_split"  # in the meta of `own_input`: how the leaf is cut


def own_input(leaf: Tensor) -> Tensor:
    """A leaf of the batch, of which each rank takes its part."""
    raise NotImplementedError


@rule("own_input")
def own_input_rule(ask: Ask) -> Answer:
    split: Split = ask.node.meta[OWN_SPLIT]
    dim, size = dim_of(split), ask.size
    blocks = dealt_blocks(split, ask.shape(0)[dim])

    def own(to: Emitter, args: list[fx.Node]) -> fx.Node:
        return to.call(torch.ops.piper.own_leaf.default, args[0], dim, blocks, size, to.place())

    return Answer([REPLICATED], split, own)


def step_result(value: Tensor) -> Tensor:
    """A result of the step, which code makes and not a change of layout."""
    raise NotImplementedError


@rule("step_result")
def step_result_rule(ask: Ask) -> Answer:
    return Answer([REPLICATED], REPLICATED, lambda to, args: to.call(aten.clone.default, args[0]))


STAND_INS = (own_input, step_result)


def with_stand_ins(
    graph: fx.Graph, *, batch: dict[fx.Node, Split], joined: tuple[int, ...]
) -> None:
    """Leaves of `batch` are cut first; the results of these numbers are joined last."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for leaf, split in batch.items():
        with graph.inserting_before(first):
            own = graph.call_function(own_input, (leaf,))
        own.meta = {**leaf.meta, OWN_SPLIT: split}
        leaf.replace_all_uses_with(own, delete_user_cb=lambda user: user.target is not own_input)
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    for index, result in enumerate(results):
        target = step_result if index in joined else aten.clone.default
        again = result in results[:index]  # what two outputs were is one by now
        if index in joined or result.op != "call_function" or again:
            with graph.inserting_before(output):
                results[index] = graph.call_function(target, (result,))
            results[index].meta = dict(result.meta)
    output.args = (tuple(results),)
