"""Floating-point operations: an ATen operator with the values it is given in, their number out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# Kernels that torch does not count, and those that do the same.
_LIKE = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}


def operator_flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of one call, from its shapes; only matrix products, convolutions and attention count."""
    packet = _LIKE.get(packet, packet)
    if packet in flop_registry:
        return _as_int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet in (torch.ops.piper.grouped_mm, torch.ops.piper.grouped_mm_weight):
        x, other = args[:2]
        return 2 * _as_int(x.shape[0] * x.shape[1] * other.shape[-1])
    return 0


def _as_int(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
