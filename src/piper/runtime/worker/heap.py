"""Heap: a rank's process keeps the memory that it frees, for the same tensors of the next step."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's numbers for mallopt


def keep_memory() -> None:
    """By default glibc gives large blocks back to the system and asks again, and each page of them costs
    a fault: a sixth of a step was measured on small models. Other C libraries have no such setting."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)
