"""Precisions: the name of one in, the dtype that a model computes in out."""

from __future__ import annotations

from piper.errors import PlanError

_DTYPES = {None: "", "fp32": "", "bf16": "bfloat16"}  # "" is as the model is written


def dtype_of(precision: str | None) -> str:
    if precision not in _DTYPES:
        raise PlanError(f"precision={precision!r}", legal='"bf16", or "fp32" or None as written')
    return _DTYPES[precision]


def has_float32_operators(precision: str | None) -> bool:
    """Whether losses, norms and the like compute in float32 where all else does not."""
    return precision == "bf16"
