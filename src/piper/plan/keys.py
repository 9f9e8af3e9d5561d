"""Keys of random operations: which ones a Value holds, and each as a number.

A key depends on the seed, the step, the operation's index in the uncut trace and the global
microbatch, so that every strategy draws what one device draws.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

KEY = "$key."  # names of Values that hold keys: `$key.0-2,5`


def ranges_of(indexes: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2,5"`; the order is kept."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def indexes_in(ranges: str) -> list[int]:
    """`"0-2,5"` -> `[0, 1, 2, 5]`."""
    found: list[int] = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def num_indexes(ranges: str) -> int | None:
    """How many `indexes_in` would give; None if these are no ranges."""
    words = [
        re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word, re.ASCII) for word in ranges.split(",")
    ]
    if not all(words):
        return None
    return sum(max(0, int(w[2] or w[1]) - int(w[1]) + 1) for w in words if w)


def key_of(seed: int, *, step: int, index: int, microbatch: int) -> int:
    """The key of one random operation: 63 bits. `microbatch` is the global one."""
    text = f"{seed}:{step}:{index}:{microbatch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
