"""Layers that are left out by chance (`if torch.rand([]) < layerdrop: continue`): a chance of 0 is none.

No trace can go both ways. With a probability that leaves no choice the number is still drawn, as the
eager step draws it, and the comparison is a plain bool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

_rand = torch.rand
_NAMES = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")


class _Drawn:
    """A number of [0, 1) that is compared with a probability."""

    def __init__(self, number: Tensor) -> None:
        self.number = number

    def __lt__(self, probability: Any) -> Any:
        if isinstance(probability, int | float) and not 0 < probability < 1:
            return probability >= 1
        return self.number < probability

    def __gt__(self, probability: Any) -> Any:
        if isinstance(probability, int | float) and not 0 < probability < 1:
            return probability <= 0
        return self.number > probability


@contextlib.contextmanager
def certain_layers(model: nn.Module) -> Iterator[None]:
    """While a model with such layers is traced; others may use the number as any tensor."""
    if not any(getattr(module, name, None) == 0 for module in model.modules() for name in _NAMES):
        yield
        return
    with patch.object(torch, "rand", _draw):
        yield


def _draw(*size: Any, **options: Any) -> Any:
    number = _rand(*size, **options)
    return _Drawn(number) if number.dim() == 0 and not options else number
