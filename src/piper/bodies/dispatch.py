"""Watching operators: which of the ATen operators under some code draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RandomWatch(TorchDispatchMode):
    """Notes the operators that draw random numbers while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs or {}):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def draws_random(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call's result depends on a generator; switched-off dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    given = bound_arguments(operator, args, kwargs)
    if "dropout_p" in given:
        return given["dropout_p"] > 0
    return given.get("training", given.get("train", True)) is not False


def bound_arguments(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
