"""Watching the ATen operators under some code: which draw random numbers, and what they cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from piper.bodies.flops import operator_flops
from piper.bodies.leaves import tensors_in
from piper.cost.estimate import NOMINAL


class RandomWatch(TorchDispatchMode):
    """Notes the operators that draw random numbers while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs or {}):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


class CostWatch(TorchDispatchMode):
    """Adds up the seconds that operators would take, each bound by its flops or by its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if made and not _is_view(func):  # fake tensors also ask for their devices
            flops = operator_flops(func.overloadpacket, args, kwargs, result)
            touched = [*tensors_in((args, kwargs)), *made]
            self.seconds += NOMINAL.roofline(flops, sum(map(_nbytes, touched)), "")
        return result


def _is_view(operator: Any) -> bool:
    given = [argument.alias_info for argument in operator._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in given)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def draws_random(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call's result depends on a generator; dropout of nothing, or of all, does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    given = bound_arguments(operator, args, kwargs)
    if "dropout_p" in given:
        return given["dropout_p"] > 0
    if operator is torch.ops.aten.native_dropout.default and given["p"] in (0.0, 1.0):
        return False
    return given.get("training", given.get("train", True)) is not False


def bound_arguments(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
