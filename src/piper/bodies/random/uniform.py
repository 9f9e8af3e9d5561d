"""Uniform numbers as a pure function: keys and a position in, the same bits on any device out.

A counter-based generator (splitmix64: Steele, Lea, Flood, OOPSLA 2014) in plain integer operators: no
generator with a state, so that running code again draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 24  # elements at a time: integers take more memory than the result
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_ALL_BITS = (1 << 64) - 1


def _signed(number: int) -> int:
    """The int64 with the same bits."""
    number &= _ALL_BITS
    return number - (1 << 64) if number >> 63 else number


_STRIDE = 0x9E3779B97F4A7C15
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


@torch.library.custom_op("piper::keyed_uniform", mutates_args=())
def keyed_uniform(
    keys: Tensor, position: int, draw: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Numbers in [0, 1) from `keys[position]`; `draw` numbers the draws under one key."""
    digits = _DIGITS[dtype]
    key = _mixed(keys[position] + _signed((draw + 1) * _STRIDE))
    out = torch.empty(math.prod(shape), dtype=dtype, device=keys.device)
    for start in range(0, out.numel(), _BLOCK):
        end = min(start + _BLOCK, out.numel())
        bits = torch.arange(start, end, dtype=torch.int64, device=keys.device)
        bits = _shifted(_mixed(bits.mul_(_signed(_STRIDE)).add_(key)), 64 - digits)
        out[start:end] = bits
    return out.mul_(2.0**-digits).view(*shape)


@keyed_uniform.register_fake
def _(keys: Tensor, position: int, draw: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return keys.new_empty(shape, dtype=dtype)


def _mixed(bits: Tensor) -> Tensor:
    """splitmix64's finalizer: every bit of the result depends on every bit; changes `bits`."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_FACTORS[0])
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_FACTORS[1])
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right; the operator for signed integers copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
