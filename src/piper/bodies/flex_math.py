"""Flex attention as plain math: every score is computed, and masked ones count for nothing.

A BlockMask says which blocks of scores a kernel may skip; its `mask_mod` alone says which count.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

MODULE = "torch.nn.attention.flex_attention"


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """The operator's own form in eager mode, without its kernels."""
    from torch._higher_order_ops.flex_attention import sdpa_dense

    return sdpa_dense(*args, **kwargs)


@contextlib.contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Torch has no kernel for the backward on CPUs, and refuses to be asked; math needs none."""
    module = sys.modules.get(MODULE)
    if module is None:  # nobody can call it
        yield
        return
    with patch.object(module, "_validate_device", lambda *args: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield
