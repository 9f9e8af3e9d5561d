"""Name patterns: values by parameter in; the same by pattern, one for equal layers, out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer


def as_patterns(found: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """Layers' numbers become `*` where all of `names` that match then have that value."""
    patterns: dict[str, T] = {}
    for name, value in found.items():
        pattern = _NUMBER.sub("*", name)
        if pattern in patterns:
            continue
        alike = all(
            found.get(other, None) == value for other in names if fnmatchcase(other, pattern)
        )
        patterns[pattern if alike and not set("[?*") & set(name) else name] = value
    return patterns
