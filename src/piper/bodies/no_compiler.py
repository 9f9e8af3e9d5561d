"""Torch without its compiler: importing that takes as long as importing torch itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS


def spare_compiler() -> None:
    """Optimizers and custom operators turn torch's compiler off around their code, and import it for
    that. A process that has not imported it has nothing to turn off."""
    if "torch._dynamo" in sys.modules:
        return
    for guarded in _guarded():
        plain = getattr(guarded, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain


def _guarded() -> Iterator[Any]:
    yield from vars(torch.optim.Optimizer).values()
    for operator in OPDEFS.values():
        yield from operator._backend_fns.values()
