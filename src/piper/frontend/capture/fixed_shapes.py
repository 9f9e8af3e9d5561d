"""Functions whose result has a shape that depends on data, where the user's arguments say it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

_bincount = torch.bincount


@contextlib.contextmanager
def fixed_shapes() -> Iterator[None]:
    """While Dynamo traces: `bincount(x, minlength=E)` counts x in 0 to E-1, and nothing beyond; another
    number in x is then an error of the step."""
    with patch.object(torch, "bincount", _counts), patch.object(Tensor, "bincount", _counts):
        yield


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if weights is not None or minlength == 0:
        return _bincount(input, weights, minlength)
    places = input.to(torch.int64)
    zeros = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return zeros.scatter_add(0, places, torch.ones_like(places))
