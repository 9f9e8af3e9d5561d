"""Initial weights of the benchmarks' models: made once in a run, in a file that all sides read."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
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
    """A card makes them faster, but in a process that ends: this one is to hold nothing there."""
    path = os.path.join(_folder(), f"{len(os.listdir(_folder()))}.pt")
    if torch.cuda.is_available():
        subprocess.run([sys.executable, __file__, path, json.dumps(asdict(sizes))], check=True)
    else:
        _write(sizes, path, "cpu")
    return path


def _write(sizes: Sizes, path: str, device: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device(device):
            made = Transformer(sizes, 1)
        torch.save({name: param.cpu() for name, param in made.state_dict().items()}, path)


def load_weights(module: nn.Module, path: str) -> nn.Module:
    """Fill what a module has of them."""
    stored = torch.load(path, mmap=True, weights_only=True)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(stored[name])
    return module


if __name__ == "__main__":
    _write(Sizes(**json.loads(sys.argv[2])), sys.argv[1], "cuda")
