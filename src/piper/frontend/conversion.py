"""Conversion of fake modules: `.double()` and `.to()` inside `make_model`.

torch 2.11 and 2.13 swap fake parameters on conversion, which fails because fake tensors always have weak
references. While a model is built, parameters are replaced instead. This can go when torch can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def replacing_parameters() -> Iterator[None]:
    original = nn.Module._apply
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # so that tied parameters stay tied
    depth = 0

    def convert(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in replaced:
            with torch.no_grad():
                made = function(tensor)
            if made is not tensor and isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            replaced[id(tensor)] = tensor, made
        return replaced[id(tensor)][1]

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        for child in module.children() if recurse else ():
            child._apply(function)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = convert(tensor, function)
        depth -= 1
        if depth == 0:
            replaced.clear()
        return module

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = original
