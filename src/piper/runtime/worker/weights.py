"""Weights: the initial value of a model's tensor, from the seed and its name alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from piper.bodies.files.codec import load
from piper.plan.holdings import Holding
from piper.plan.types import ModelTensor


def initial_value(tensor: ModelTensor, bodies: Mapping[str, str], *, seed: int) -> Tensor:
    """The whole tensor, on the CPU."""
    seeds = [_seed(seed, key) for key in tensor.keys]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        (value,) = load(bodies[tensor.init])(*seeds)
    value = value.resolve_conj().resolve_neg()
    return value.clone(memory_format=torch.contiguous_format)


def elements_of(whole: Tensor, held: Holding) -> Tensor:
    """The elements of a holding, one after the other, out of the whole tensor."""
    pairs = zip(held.box.start, held.box.size, strict=True)
    box = whole[tuple(slice(start, start + size) for start, size in pairs)]
    return box.reshape(-1)[held.first : held.last]


def _seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:7], "little")
