"""Devices that bodies can be made for."""

from __future__ import annotations

import torch

from piper.errors import PlanError


def own_device() -> str:
    """The kind of device that this machine computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_names() -> list[str]:
    """Of each card that torch sees."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def check_device(device: str) -> None:
    """Raise unless bodies for this kind of device can be traced here.

    Tracing with fake CUDA tensors on a machine without CUDA would end the process (torch 2.11 and 2.13).
    """
    if device not in ("cpu", "cuda"):
        raise PlanError(f"no kind of device is called {device!r}", legal="cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("there is no CUDA device here to make bodies for", legal="device='cpu'")
