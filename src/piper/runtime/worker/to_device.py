"""Tensors of the host in, on a device out, without the host waiting for what that has to do before."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Where a device takes it by itself, if it has to be brought there."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Of what is `pinned`, or a part of it, the copy is in the order of the stream alone."""
    return tensor.to(device, non_blocking=True)
