"""Building a model on fake tensors: what torch itself cannot do there.

`building` can go when torch 2.11 and 2.13 are no longer supported and their successors can do both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def building(mode: Any) -> Iterator[None]:
    """While a model is built: conversions replace parameters, truncated normals need no rejection,
    and real tensors may be written into fake ones."""
    mode.allow_non_fake_inputs = True
    try:
        with _replacing_parameters(), _direct_truncation():
            yield
    finally:
        mode.allow_non_fake_inputs = False


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters of floating point in another dtype; tied ones stay tied, buffers stay as they are."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_floating_point():
                if id(param) not in cast:
                    made = param.detach().to(dtype)
                    cast[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
                module._parameters[name] = cast[id(param)]


@contextlib.contextmanager
def _direct_truncation() -> Iterator[None]:
    """`trunc_normal_` by the inverse of the distribution, since rejection looks at the samples."""
    original = nn.init._no_grad_trunc_normal_

    def truncated(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
        with torch.no_grad():
            tensor.uniform_(low, high, generator=generator).erfinv_()
            return tensor.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextlib.contextmanager
def _replacing_parameters() -> Iterator[None]:
    """`.double()` and `.to()`: torch swaps fake parameters on conversion, which fails because fake
    tensors always have weak references."""
    original = nn.Module._apply
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # so that tied parameters stay tied
    depth = 0

    def convert(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in replaced:
            with torch.no_grad():
                made = function(tensor)
            if made is not tensor and isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                for key, mark in vars(tensor).items():  # what the user set, for an optimizer to see
                    vars(made).setdefault(key, mark)
            replaced[id(tensor)] = tensor, made
        return replaced[id(tensor)][1]

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        for child in module.children() if recurse else ():
            child._apply(function)
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in stores:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = convert(tensor, function)
        depth -= 1
        if depth == 0:
            replaced.clear()
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
