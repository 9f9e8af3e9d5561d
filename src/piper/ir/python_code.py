"""Arguments as Python code: what a directive was given in, text that gives the same again out."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from typing import Any


def keywords_code(named: Mapping[str, Any]) -> list[str]:
    """`PP=0` for each, or `**{'my-tag': 0}` for names that Python cannot write so."""
    words = [f"{key}={v!r}" for key, v in named.items() if _is_name(key)]
    odd = [f"{key!r}: {v!r}" for key, v in named.items() if not _is_name(key)]
    return [*words, f"**{{{', '.join(odd)}}}"] if odd else words


def _is_name(key: str) -> bool:
    return key.isidentifier() and not iskeyword(key)
