"""Watching operators: which of the ATen operators under some code draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RandomWatch(TorchDispatchMode):
    """Notices whether an operator draws random numbers while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or draws_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def draws_random(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call's result depends on a generator; switched-off dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {
        a.name: a.default_value for a in operator._schema.arguments if a.has_default_value()
    }
    given = defaults | given
    if "dropout_p" in given:
        return given["dropout_p"] > 0
    return given.get("training", given.get("train", True)) is not False
