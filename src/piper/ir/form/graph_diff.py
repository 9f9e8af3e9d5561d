"""graph_diff: two graphs in, lines that say what differs between them out, alike changes together."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from piper.ir.graph import Graph, Order
from piper.ir.layouts import layouts_text
from piper.ir.nodes import Node
from piper.ir.select import Selector
from piper.ir.values import Value

_HEADER = (
    "level",
    "mesh",
    "streams",
    "splits",
    "orders",
    "edges",
    "overlaps",
    "loss",
    "count",
    "metrics",
)
_WIDTH = 96


def graph_diff(before: Graph, after: Graph) -> str:
    """One line per thing that came (+) or went (-), and per field that changed; '' if nothing did."""
    lines = [*_header(before, after)]
    for old, new in ((before.nodes, after.nodes), (before.values, after.values)):
        lines += [f"- {_line(item)}" for name, item in old.items() if name not in new]
        lines += [f"+ {_line(item)}" for name, item in new.items() if name not in old]
        lines += _changes(old, new)
    return "".join(f"{part}\n" for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    """A long line in several, at its spaces; what continues it stands further right."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _header(before: Graph, after: Graph) -> Iterator[str]:
    for field in _HEADER:
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            yield from _changed_field(field, old, new)


def _changed_field(field: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, tuple) and isinstance(new, tuple) and not _is_layout(field):
        yield from (f"{field} - {shown(item)}" for item in old if item not in new)
        yield from (f"{field} + {shown(item)}" for item in new if item not in old)
    else:
        yield f"{field} {_field(field, old)} -> {_field(field, new)}"


def _is_layout(field: str) -> bool:
    return field == "layout"


def _field(field: str, value: Any) -> str:
    return f"{{{layouts_text(value)}}}" if _is_layout(field) else shown(value)


def _changes(old: Mapping[str, Node | Value], new: Mapping[str, Node | Value]) -> Iterator[str]:
    """Each change of fields, under the names of all that it happened to."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, item in new.items():
        was = old.get(name, item)
        if was is not item and was != item:
            alike.setdefault(tuple(_field_changes(was, item)), []).append(name)
    for changes, names in alike.items():
        yield "  ".join(names)
        yield from (f"    {change}" for change in changes)


def _field_changes(was: Any, item: Any) -> Iterator[str]:
    if type(was) is not type(item):
        yield f"{type(was).__name__} -> {type(item).__name__}"
        return
    for field in item.__struct_fields__:
        old, new = getattr(was, field), getattr(item, field)
        if old != new:
            yield from _changed_field(field, old, new)


def _line(item: Node | Value) -> str:
    if isinstance(item, Value):
        layout = f" {{{layouts_text(item.layout)}}}" if item.layout else ""
        return f"{item.name}  {item.role} {item.type}{layout}"
    at = f" at {item.slice}" if item.slice is not None else ""
    return f"{item.name} ({' '.join(item.inputs)}) -> ({' '.join(item.outputs)}){at}"


def shown(value: Any) -> str:
    """A value of a field in few words."""
    if value is None:
        return "none"
    if isinstance(value, Order):
        groups = " => ".join(" | ".join(_member(m) for m in group) for group in value.groups)
        return f"{value.only or 'every slice'}: {groups}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, msgspec.Struct) and type(value).__str__ is object.__str__:
        return _struct(value)
    return str(value) if value != "" else "''"


def _member(member: Sequence[Selector]) -> str:
    """`F[PP=0,MB=1]` per selector."""
    return " then ".join(
        f"{s.comm or s.phase or ''}[{','.join(f'{tag}={value}' for tag, value in s.tags)}]"
        for s in member
    )


def _struct(value: msgspec.Struct) -> str:
    words = []
    for field in msgspec.structs.fields(type(value)):
        item = getattr(value, field.name)
        if field.required or item != field.default:
            words.append(f"{field.name}={shown(item)}")
    return f"{type(value).__name__}({', '.join(words)})"
