"""Weights: the initial value of a model's tensor, from the seed and its name alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from piper.bodies.store import load
from piper.plan.types import ModelTensor


def initial_value(
    name: str, tensor: ModelTensor, bodies: Mapping[str, str], *, seed: int
) -> Tensor:
    """The whole tensor, on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        (value,) = load(bodies[tensor.init])()
    return value.clone(memory_format=torch.contiguous_format)
