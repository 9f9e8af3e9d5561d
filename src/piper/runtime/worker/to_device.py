"""Tensors of the host in, on a device out, without the host waiting for what that has to do before."""

from __future__ import annotations

import torch
from torch import Tensor


def lent(tensor: Tensor, device: torch.device) -> Tensor:
    """Where the device's current stream takes it by itself, when it comes so far: memory of the host
    that is our own, or what lies on the device, kept for the stream."""
    if device.type != "cuda":
        return tensor
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        tensor.record_stream(stream)
        return tensor
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return own.copy_(tensor)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Of what is `lent`, or a part of it, the copy is in the order of the stream alone."""
    return tensor.to(device, non_blocking=True)
