"""Two texts in; the first line in which they differ, but for small differences of numbers, out."""

from __future__ import annotations

import math
import re
from itertools import zip_longest

_HASH = re.compile(r"\b[0-9a-f]{16}\b")
_NUMBER = re.compile(r"(?<![A-Za-z_.])\d+(?:\.\d+)?")


def difference(one: str, other: str, *, close: float = 0.01, near: float = 0.0) -> str:
    """Empty if all words are equal, and numbers to a part `close` of them or within `near`.

    Hashes of plans, and how wide columns are, may differ.
    """
    shown, said = (
        [" ".join(_HASH.sub("HASH", line).split()) for line in text.splitlines()]
        for text in (one, other)
    )
    for first, second in zip_longest(shown, said, fillvalue=""):
        words = [_NUMBER.sub("0", line) for line in (first, second)]
        numbers = [map(float, _NUMBER.findall(line)) for line in (first, second)]
        if words[0] != words[1] or not all(
            math.isclose(a, b, rel_tol=close, abs_tol=near) for a, b in zip(*numbers, strict=True)
        ):
            return f"{first!r}\nis not\n{second!r}"
    return ""
