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

import torch

MODULE = "torch.nn.attention.flex_attention"
_ENVIRONMENT = "setup_compilation_env"  # around the call that flex attention compiles


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


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Functions that the user's code compiles run as they were written. Flex attention compiles its own
    call in eager mode, for gradients of what masks and scores read: that stays."""
    module: Any = sys.modules.get(MODULE)
    original: Any = getattr(module, _ENVIRONMENT, None)
    if (
        module is not None and original is None
    ):  # another torch: better compiled than without gradients
        yield
        return

    @contextlib.contextmanager
    def compiling() -> Iterator[Any]:
        with torch.compiler.set_stance("default"), original() as backend:
            yield backend

    patched = (
        patch.object(module, _ENVIRONMENT, compiling) if original else contextlib.nullcontext()
    )
    with torch.compiler.set_stance("force_eager"), patched:
        yield
