"""The rule of attention: by heads, by samples, or by queries with all keys and values."""

from __future__ import annotations

import torch
from torch import fx

from piper.bodies.tensor import part_ops as part_ops
from piper.bodies.tensor.parts import dealt_blocks, dim_of, moved
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, aten, rule
from piper.ir.layouts import REPLICATED, Layout, Split, divides


@rule("scaled_dot_product_attention")
def attention(ask: Ask) -> Answer:
    query = ask.summed()[0]
    num_dims = len(ask.shape(0))
    if not isinstance(query, Split) or query.dim == num_dims - 1:
        return ask.all_replicated("heads are not whole" if isinstance(query, Split) else "")
    if query.dim == num_dims - 2:
        return _by_queries(ask, query)
    dim = dim_of(query)
    if dim == num_dims - 3 and not divides(query, ask.shape(1), ask.size):
        return ask.all_replicated(f"{ask.shape(1)[dim]} key heads do not divide by {ask.size}")
    masks: list[Layout] = []
    for index in range(3, len(ask.args)):
        shape = ask.shape(index)
        of_mask = dim - (num_dims - len(shape))
        cut = of_mask >= 0 and shape[of_mask] > 1
        masks.append(moved(query, of_mask) if cut else REPLICATED)
    return Answer([query, query, query, *masks], query)


def _by_queries(ask: Ask, query: Split) -> Answer:
    masks: list[Layout] = [
        moved(query, len(ask.shape(i)) - 2)
        if len(ask.shape(i)) > 1 and ask.shape(i)[-2] > 1
        else REPLICATED
        for i in range(3, len(ask.args))
    ]
    wants = [query, REPLICATED, REPLICATED, *masks]
    if not ask.given["is_causal"]:
        return Answer(wants, query)
    length, keys = ask.shape(0)[-2], ask.shape(1)[-2]
    blocks, size = dealt_blocks(query, length), ask.size
    target, device = ask.node.target, ask.made.device
    scale, grouped = ask.given.get("scale"), ask.given.get("enable_gqa", False)

    def causal(to: Emitter, args: list[fx.Node]) -> fx.Node:
        """The rows of the causal mask that the rank's queries have."""
        row = to.call(aten.arange.default, length, device=device)
        row = to.call(torch.ops.piper.own_leaf.default, row, 0, blocks, size, to.place())
        key = to.call(aten.arange.default, keys, device=device)
        mask = to.call(aten.ge.Tensor, to.call(aten.unsqueeze.default, row, 1), key)
        return to.call(target, *args[:3], mask, scale=scale, enable_gqa=grouped)  # type: ignore[arg-type]

    return Answer(wants, query, causal)
