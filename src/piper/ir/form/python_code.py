"""Values as Python code: what a directive was given in, text that gives the same again out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from piper.mesh import Slice


def call_code(function: str, plain: Sequence[str], named: Mapping[str, Any]) -> str:
    """`s.place(where(PP=0), stream='pp')`; `plain` is code already."""
    return f"{function}({', '.join([*plain, *keywords_code(named)])})"


def keywords_code(named: Mapping[str, Any]) -> list[str]:
    """`PP=0` for each, or `**{'my-tag': 0}` for names that Python cannot write so."""
    words = [f"{key}={code_of(v)}" for key, v in named.items() if _is_name(key)]
    odd = [f"{key!r}: {code_of(v)}" for key, v in named.items() if not _is_name(key)]
    return [*words, f"**{{{', '.join(odd)}}}"] if odd else words


def code_of(value: Any) -> str:
    """A selector, a slice of `mesh`, a list of such, or anything whose repr is code."""
    if isinstance(value, Slice):
        return call_code("mesh.at", [], dict(value.fixed))
    if isinstance(value, list):
        return f"[{', '.join(map(code_of, value))}]"
    return value.as_code() if hasattr(value, "as_code") else repr(value)


def _is_name(key: str) -> bool:
    return key.isidentifier() and not iskeyword(key)
