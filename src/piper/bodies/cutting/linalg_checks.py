"""Checks of torch.linalg for singular matrices: plain calls without a result, which a cut leaves out.

torch 2.13 keeps their order by a token that goes through forward and backward, and no body has room for
one. A singular matrix then gives numbers that are not finite, as on CUDA without the check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._higher_order_ops import effects

_CHECK = torch.ops.aten._linalg_check_errors.default


@contextlib.contextmanager
def unordered_checks() -> Iterator[None]:
    """While code is traced."""
    original = getattr(effects, "_get_effect", None)
    if original is None:  # torch 2.11, where the check has no order
        yield
        return

    def effect_of(operator: Any) -> Any:
        return None if operator is _CHECK else original(operator)

    with patch.object(effects, "_get_effect", effect_of):
        yield
