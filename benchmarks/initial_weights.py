"""Initial weights of the benchmarks' models: made once in a run, in a file that all sides read."""

from __future__ import annotations

import atexit
import os
import tempfile
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from transformer import Sizes, Transformer


@cache
def _folder() -> str:
    made = tempfile.TemporaryDirectory(prefix="piper-bench-weights-")
    atexit.register(made.cleanup)
    return made.name


def weights_file(sizes: Sizes) -> str:
    """The path of a model's weights, which are the same for every batch."""
    return _weights_file(replace(sizes, rows=1, microbatches=1))


@cache
def _weights_file(sizes: Sizes) -> str:
    path = os.path.join(_folder(), f"{len(os.listdir(_folder()))}.pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(Transformer(sizes, 1).state_dict(), path)
    return path


def load_weights(module: nn.Module, path: str) -> nn.Module:
    """Fill what a module has of them."""
    stored = torch.load(path, mmap=True, weights_only=True)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(stored[name])
    return module
