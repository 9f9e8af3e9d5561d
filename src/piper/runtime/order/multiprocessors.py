"""Multiprocessors: how many of a card's the matrix products of this thread may take.

cuBLAS has a function for it, which is called by the handle that torch uses. Products that torch gives to
another library take what they want: those with a bias (cuBLASLt), and grouped ones. Where cuBLAS is not
found, all products do, and `problem` says so.
"""

from __future__ import annotations

import ctypes
from functools import cache, cached_property
from typing import Any, ClassVar

import torch


class Multiprocessors:
    """Of one device; what products leave stays so until it is changed, by whichever plan."""

    left: ClassVar[int] = 0  # by products of this process

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._set = _function()
        self.problem = "" if self._set else "no cuBLAS with cublasSetSmCountTarget is loaded"

    @cached_property
    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def leave(self, num: int) -> None:
        """Have products that are started from now on leave so many free; with 0, none."""
        if num == Multiprocessors.left or self._set is None:
            return
        # They keep a half at least; 0 stands for all of them.
        wanted = max(self.total - num, self.total // 2) if num else 0
        error = self._set(torch.cuda.current_blas_handle(), wanted)
        if error:
            raise RuntimeError(f"cuBLAS gives {error} for a target of {wanted} multiprocessors")
        Multiprocessors.left = num


@cache
def _function() -> Any:
    """Of the library that this process has loaded; torch brings its own, so that no name leads to it."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcublas.so" in line}
    for path in sorted(paths):
        function = getattr(ctypes.CDLL(path), "cublasSetSmCountTarget", None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_int]
            return function
    return None
