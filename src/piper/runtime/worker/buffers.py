"""Buffers: a rank's slots in; the memory that some of them take turns in, made once, out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from piper.plan.slots import Slot


def pooled_tensors(slots: Sequence[Slot], device: torch.device) -> dict[int, Tensor]:
    """Slot -> its tensor in the buffer that it shares with others."""
    sizes: dict[int, int] = defaultdict(int)
    for slot in slots:
        if slot.pool >= 0:
            size = math.prod(slot.shape) * getattr(torch, slot.dtype).itemsize
            sizes[slot.pool] = max(sizes[slot.pool], size)
    buffers = {
        pool: torch.empty(size, dtype=torch.uint8, device=device) for pool, size in sizes.items()
    }
    found: dict[int, Tensor] = {}
    for index, slot in enumerate(slots):
        if slot.pool >= 0:
            dtype = getattr(torch, slot.dtype)
            size = math.prod(slot.shape) * dtype.itemsize
            found[index] = buffers[slot.pool][:size].view(dtype).view(slot.shape)
    return found
