"""Sizes of memory: a number of bytes or a text such as "25MiB" in, bytes out; and back."""

from __future__ import annotations

import math
import re

from piper.errors import Call, PlanError

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(size: int | str, *, call: Call | None = None, requirement: int | None = None) -> int:
    """Bytes of `size`; raises if it is neither a positive integer nor a number with a unit."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = found and (found[2] or "B")
        if found and unit in _UNITS and 0 < float(found[1]) < 2**63:
            return max(1, int(float(found[1]) * _UNITS[unit]))
    raise PlanError(
        f"{size!r} is no size",
        call=call,
        requirement=requirement,
        legal=f'a positive number of bytes, or a text such as "25MiB" ({", ".join(_UNITS)})',
    )


def show_size(size: int) -> str:
    """`25.0 MiB`."""
    if size < 1024:
        return f"{size} B"
    power = min(int(math.log(size, 1024)), 4)
    return f"{size / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
