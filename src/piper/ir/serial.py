"""Versioned JSON: a graph, or any type with a version, in; bytes out; and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from piper.errors import PlanError
from piper.files import excess
from piper.ir.graph import VERSION, Graph

T = TypeVar("T")
Hook = Callable[[type, Any], Any]  # reads what msgspec has no type for


def graph_to_json(graph: Graph) -> bytes:
    return msgspec.json.encode(graph)


def graph_from_json(data: bytes) -> Graph:
    return decode_versioned(data, Graph, version=VERSION)


def decode_versioned(data: bytes, kind: type[T], *, version: int, hook: Hook | None = None) -> T:
    """What `data` holds; raises if it is something else, or of another version."""
    name = kind.__name__.lower()
    try:
        too_much = excess(data)
        if too_much:
            raise msgspec.DecodeError(too_much)
        found = msgspec.json.decode(data, type=kind, dec_hook=hook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(
            f"not a Piper {name}: {error}",
            legal="a file that `piper plan FILE.py -o PLAN.json` wrote" if name == "plan" else None,
        ) from None
    if getattr(found, "version", version) != version:
        raise PlanError(f"a {name} of another version is not readable; this is version {version}")
    return found
