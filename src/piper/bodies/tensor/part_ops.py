"""Operators of our own that know a rank's place: what one device would make in, one rank's part out.

Numbers of a mask are keyed by an element's index in the whole tensor, so that a rank draws exactly the
part that one device would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.bodies.random.uniform import (
    _BLOCK,
    _STRIDE,
    _mixed,
    _shifted,
    _signed,
    keyed_uniform,
)

_DIGITS = 24  # of the float32 numbers that masks are drawn from


@torch.library.custom_op("piper::keyed_mask", mutates_args=())
def keyed_mask(like: Tensor, keys: Tensor, position: int, keep: float) -> Tensor:
    """True with probability `keep`, as `Keyed.mask` draws it first from `keys[position]`."""
    return keyed_uniform(keys, position, 0, list(like.shape), torch.float32) < keep


@keyed_mask.register_fake
def _(like: Tensor, keys: Tensor, position: int, keep: float) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


@torch.library.custom_op("piper::keyed_mask_part", mutates_args=())
def keyed_mask_part(
    like: Tensor,
    keys: Tensor,
    position: int,
    keep: float,
    shape: Sequence[int],
    dims: Sequence[int],
    num_ranks: Sequence[int],
    num_blocks: Sequence[int],
    blocks: Sequence[int],
    places: Sequence[Tensor],
) -> Tensor:
    """One rank's part of the mask of this shape that `keyed_mask` draws; `like` is what it masks.

    Cuts follow each other, one per axis. The k-th cuts dims[k] in num_blocks[k] blocks, whose sizes are
    the next of `blocks`, and gives each of num_ranks[k] ranks a part of every one.
    """
    along = [torch.arange(n, dtype=torch.int64, device=keys.device) for n in shape]
    rest = list(blocks)
    for dim, ranks, num, place in zip(dims, num_ranks, num_blocks, places, strict=True):
        own = own_positions(rest[:num], ranks, place.to(keys.device))
        along[dim] = along[dim].index_select(0, own)
        rest = rest[num:]
    key = _mixed(keys[position] + _signed(_STRIDE))
    out = torch.empty(like.numel(), dtype=torch.bool, device=keys.device)
    for start in range(0, out.numel(), _BLOCK):
        end = min(start + _BLOCK, out.numel())
        here = torch.arange(start, end, dtype=torch.int64, device=keys.device)
        bits = _mixed(_index_in_whole(here, along, shape).mul_(_signed(_STRIDE)).add_(key))
        out[start:end] = _shifted(bits, 64 - _DIGITS).to(torch.float32).mul_(2.0**-_DIGITS) < keep
    return out.view(like.shape)


@keyed_mask_part.register_fake
def _(
    like: Tensor,
    keys: Tensor,
    position: int,
    keep: float,
    shape: Sequence[int],
    dims: Sequence[int],
    num_ranks: Sequence[int],
    num_blocks: Sequence[int],
    blocks: Sequence[int],
    places: Sequence[Tensor],
) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


def _index_in_whole(here: Tensor, along: list[Tensor], shape: Sequence[int]) -> Tensor:
    """The flat index in the whole of elements at flat indexes of the part; changes `here`.

    `along` has, for each dim, the positions in the whole of what the part has.
    """
    index, stride = torch.zeros_like(here), 1
    for positions, length in zip(reversed(along), reversed(shape), strict=True):
        index += positions[here % len(positions)].mul_(stride)
        here //= len(positions)
        stride *= length
    return index


@torch.library.custom_op("piper::own_leaf", mutates_args=())
def own_leaf(leaf: Tensor, dim: int, blocks: Sequence[int], size: int, place: Tensor) -> Tensor:
    """The part of rank `place` of a leaf of the batch, cut along `dim` in blocks of these sizes.

    One operator, so that whoever cuts the code along another axis sees which dims stay.
    """
    return leaf.index_select(dim, own_positions(blocks, size, place.to(leaf.device)))


@own_leaf.register_fake
def _(leaf: Tensor, dim: int, blocks: Sequence[int], size: int, place: Tensor) -> Tensor:
    return leaf.new_empty([n // size if d == dim else n for d, n in enumerate(leaf.shape)])


def own_positions(blocks: Sequence[int], size: int, place: Tensor) -> Tensor:
    """Where the elements of a rank's part of a dim lie in the whole. Of a block of negative size the
    first rank has the last part."""
    found, start = [], 0
    for block in blocks:
        part = abs(block) // size
        own = torch.arange(part, dtype=torch.int64, device=place.device)
        number = place if block > 0 else size - 1 - place
        found.append(own + number * part + start)
        start += abs(block)
    return torch.cat(found)
