"""The rules of masks: each rank draws its part of the mask that one device would draw."""

from __future__ import annotations

import torch
from torch import fx

from piper.bodies.tensor import part_ops as part_ops
from piper.bodies.tensor.parts import dealt_blocks, dim_of
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, rule
from piper.ir.layouts import REPLICATED, Split


@rule("keyed_mask")
def keyed_mask(ask: Ask) -> Answer:
    return _own_mask(ask, shape=list(ask.shape(0)), dims=[], ranks=[], num_blocks=[], blocks=[])


@rule("keyed_mask_part")
def keyed_mask_part(ask: Ask) -> Answer:
    """A mask that is cut along another axis already."""
    names = ("dims", "num_ranks", "num_blocks", "blocks")
    dims, ranks, num_blocks, blocks = (list(ask.given[name]) for name in names)
    shape = list(ask.given["shape"])
    return _own_mask(ask, shape=shape, dims=dims, ranks=ranks, num_blocks=num_blocks, blocks=blocks)


def _own_mask(
    ask: Ask,
    *,
    shape: list[int],
    dims: list[int],
    ranks: list[int],
    num_blocks: list[int],
    blocks: list[int],
) -> Answer:
    """One more cut behind those that there are."""
    layout = ask.summed()[0]
    others = [REPLICATED] * (len(ask.args) - 1)
    if not isinstance(layout, Split):
        return Answer([layout, *others], layout)
    dim = dim_of(layout)
    sizes = dealt_blocks(layout, ask.shape(0)[dim])
    position, keep = ask.given["position"], ask.given["keep"]
    cuts = ([*dims, dim], [*ranks, ask.size], [*num_blocks, len(sizes)], [*blocks, *sizes])

    def own(to: Emitter, args: list[fx.Node]) -> fx.Node:
        draw = torch.ops.piper.keyed_mask_part.default
        like, keys, *places = args
        return to.call(draw, like, keys, position, keep, shape, *cuts, [*places, to.place()])

    return Answer([layout, *others], layout, own)
