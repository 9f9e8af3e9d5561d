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


class _Head(msgspec.Struct):
    version: int | None = None


def decode_versioned(
    data: bytes, kind: type[T], *, version: int, hook: Hook | None = None, name: str = ""
) -> T:
    """What `data` holds; raises if it is something else, or of another version."""
    plain: Any = getattr(kind, "__origin__", kind)  # without the types of what it holds
    name = name or plain.__name__.lower()
    try:
        too_much = excess(data)
        if too_much:
            raise msgspec.DecodeError(too_much)
        _check_version(data, name, version, always=not plain.__struct_config__.omit_defaults)
        return msgspec.json.decode(data, type=kind, dec_hook=hook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(
            f"not a Piper {name}: {error}",
            legal="a file that `piper plan FILE.py -o PLAN.json` wrote" if name == "plan" else None,
        ) from None


def _check_version(data: bytes, name: str, version: int, *, always: bool) -> None:
    """Before anything else is read: another version may have other fields. `always` says that a file of
    today has its number; before version 3 plans had none."""
    try:
        found = msgspec.json.decode(data, type=_Head).version
    except msgspec.DecodeError:
        return  # it is something else, and whoever decodes it says so
    if found is None and always:
        raise PlanError(f"not a Piper {name}: it has no version; this is version {version}")
    if found not in (None, version):
        raise PlanError(f"a {name} of version {found} is not readable; this is version {version}")
