"""Attention over parts of a sequence, other than by gathering: a call in, the nodes for it out.

By heads: queries, keys and values are laid out anew, so that a rank has whole sequences of some heads;
the rule of attention takes them as they are, and its result is laid out as the queries were.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from piper.bodies.tensor.forward_code import SEQUENCE
from piper.bodies.tensor.rewrites import inserted
from piper.bodies.tensor.ring_attention import ring_nodes, ring_turn
from piper.bodies.tensor.rules.rule_table import Answer, Ask, operator_name, rule
from piper.ir.attention_forms import AttentionForm
from piper.ir.layouts import Layout, Split, divides

_SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
LAID = "piper_laid"  # in the meta of `laid_out`: how


def laid_out(value: Tensor) -> Tensor:
    """The same in a layout that is said, not found."""
    raise NotImplementedError


@rule("laid_out")
def laid_out_rule(ask: Ask) -> Answer:
    split: Split = ask.node.meta[LAID]
    return Answer([split], split, lambda to, args: args[0])


LAID_ANEW = (laid_out, ring_turn)  # that communicate is their purpose


def attention_of_parts(
    node: fx.Node, args: Sequence[fx.Node], have: Sequence[Layout], size: int, form: AttentionForm
) -> list[fx.Node] | str:
    """The nodes that stand for a call of attention now, in order; none if it stays; or why it stays,
    although it should not."""
    dims = len(args[0].meta["val"].shape) if args else 0
    sequence = have[0]
    if form.name == "gather" or not isinstance(sequence, Split) or sequence.dim != dims - 2:
        return []
    if operator_name(node) in _SOFTMAX and dims == 4:
        return "only scaled_dot_product_attention without dropout goes over ranks by " + form.name
    if operator_name(node) != "scaled_dot_product_attention" or have[:3] != [sequence] * 3:
        return []
    if form.name == "ring":
        return ring_nodes(node, args, sequence, size)
    return _by_heads(node, args[:3], sequence, size, form.head_blocks)


def _by_heads(
    node: fx.Node, args: Sequence[fx.Node], sequence: Split, size: int, blocks: int
) -> list[fx.Node] | str:
    shapes = [arg.meta["val"].shape for arg in args]
    if len(shapes[0]) != 4:
        return "there is no dim of heads, so keys and values are gathered"
    heads = Split(1, blocks)
    for shape, what in ((shapes[0], "heads"), (shapes[1], "key heads")):
        if not divides(heads, shape, size):
            ranks = f"{blocks} x {size} ranks" if blocks > 1 else f"{size} ranks"
            return f"{shape[1]} {what} do not divide over {ranks}: keys and values are gathered"
    turned = [_laid(node, arg, heads) for arg in args]
    for number, arg in enumerate(turned):
        node.update_arg(number, arg)
    with node.graph.inserting_after(node):
        back = node.graph.call_function(laid_out, (node,))
    back.meta = {**node.meta, LAID: sequence, SEQUENCE: 2}
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    return [*turned, node, back]


def _laid(node: fx.Node, arg: fx.Node, split: Split) -> fx.Node:
    new = inserted(node, laid_out, (arg,), arg.meta["val"])
    new.meta[LAID] = split
    return new
