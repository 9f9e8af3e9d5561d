"""mode_reads: whether a recorded step is the same in train() and in eval() mode.

Dynamo notes each attribute that decides what traced code does; `training` is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._guards import Guard, GuardsSet

_SETTERS = ("train", "eval", "__setattr__", "children", "named_children")


@contextlib.contextmanager
def watching_mode_reads() -> Iterator[list[str]]:
    """While Dynamo traces: what it has read of any module's mode."""
    reads: list[str] = []
    add = GuardsSet.add

    def watched_add(self: GuardsSet, guard: Guard, *args: Any, **kwargs: Any) -> None:
        if "training" in guard.name:
            reads.append(guard.name)
        add(self, guard, *args, **kwargs)

    with patch.object(GuardsSet, "add", watched_add):
        yield reads


def only_mode_changes(model: nn.Module) -> bool:
    """Whether eval() sets the flags of modules and does nothing else: a class may have its own."""
    kinds = {type(module) for module in model.modules()}
    return not any(
        hasattr(kind, "training")
        or any(getattr(kind, name) is not getattr(nn.Module, name) for name in _SETTERS)
        for kind in kinds
    )
