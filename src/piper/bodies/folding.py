"""Folding: code of state in; the body that gives a chunk's buffers their next content out.

Each data rank's forward leaves what its own microbatch adds, packed into flat tensors. The body takes
those of all ranks, one behind the other, and folds them into the buffers in the order of ranks: what one
device does that runs the microbatches one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from piper.bodies.casts import CapturedRun
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True)
class Given:
    """Where something that is given to state lies: in which output of its chunk, and from where on."""

    output: int
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FoldPart:
    """`graph` takes buffers, numbered as inputs of their chunk, and what is given to them, and returns
    the buffers' next content."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    buffers: tuple[int, ...]
    given: tuple[Given, ...]


@dataclass(frozen=True)
class Fold:
    """All state that a chunk changes; `packs` numbers the outputs that are given to it."""

    parts: tuple[FoldPart, ...]
    packs: tuple[int, ...]

    @property
    def buffers(self) -> tuple[int, ...]:
        return tuple(index for part in self.parts for index in part.buffers)


def trace_fold(
    fold: Fold,
    inputs: dict[int, TensorType],
    packs: dict[int, TensorType],
    *,
    ranks: int,
    device: str,
) -> fx.GraphModule:
    """The body for so many data ranks. It takes the buffers, then the packs, as `fold` numbers them."""
    calls = [_call_of(part, device) for part in fold.parts]
    sizes = {index: type.shape[0] for index, type in packs.items()}

    def run(*given: Tensor) -> list[Tensor]:
        state = dict(zip(fold.buffers, given, strict=False))
        packed = dict(zip(fold.packs, given[len(state) :], strict=True))
        for rank in range(ranks):
            own = {i: t.narrow(0, rank * sizes[i], sizes[i]) for i, t in packed.items()}
            for part, call in zip(fold.parts, calls, strict=True):
                taken = [
                    own[g.output].narrow(0, g.offset, math.prod(g.shape)).view(g.shape)
                    for g in part.given
                ]
                results = call(*(state[i] for i in part.buffers), *taken)
                state |= dict(zip(part.buffers, results, strict=True))
        return [_apart(state[i]) for i in fold.buffers]

    mode = FakeTensorMode()
    with mode, torch.device(device):
        made = [_empty(inputs[i]) for i in fold.buffers]
        made += [torch.empty(ranks * sizes[i], dtype=_dtype(packs[i])) for i in fold.packs]
        functional = torch.func.functionalize(run, remove="mutations")
        with torch.no_grad():
            return make_fx(functional)(*made)


def _call_of(part: FoldPart, device: str) -> Callable[..., Any]:
    root = torch.nn.Module()
    for name, constant in part.constants.items():
        root.register_buffer(name, constant.to(device))
    return CapturedRun(root, graph=part.graph).run


def _apart(tensor: Tensor) -> Tensor:
    """A content that lies in no other tensor's memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _empty(type: TensorType) -> Tensor:
    return torch.empty(type.shape, dtype=_dtype(type))


def _dtype(type: TensorType) -> torch.dtype:
    found = getattr(torch, type.dtype)
    assert isinstance(found, torch.dtype)
    return found
