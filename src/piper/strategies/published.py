"""The published JSON form of a strategy: text in, checked entries out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from piper.errors import Call, StrategyError, did_you_mean
from piper.files import excess
from piper.ir.nodes import PHASES
from piper.ir.select import ANY, Selector

PASS = "PASS"  # the tag of a filter that is a phase here
ABSENT = (None, "-")
MEGABYTE = 2**20


class Entry(msgspec.Struct, frozen=True):
    """One directive of a file: `number` counts from 1, `fields` holds what is given."""

    number: int
    op: str
    fields: dict[str, Any]
    file: str

    @property
    def call(self) -> Call:
        return Call(f"{self.file}, entry {self.number} ({self.op})")

    @property
    def devices(self) -> tuple[int, ...] | None:
        devices = self.fields.get("devices")
        return None if devices is None else tuple(devices)

    def refuse(self, message: str, *, legal: str, field: str = "") -> NoReturn:
        where = f"field {field!r}: " if field else ""
        raise StrategyError(where + message, call=self.call, legal=legal)


def _is_devices(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        and len(set(value)) == len(value)
    )


def _is_groups(value: Any) -> bool:
    if not isinstance(value, list) or len(value) < 2:
        return False
    groups = [group if isinstance(group, list) and group else [None] for group in value]
    return all(isinstance(item, dict) for group in groups for item in group)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_Check = tuple[Callable[[Any], bool], str]
_FILTER: _Check = (lambda v: isinstance(v, dict), "an object of tags")
_DEVICES: _Check = (_is_devices, "a list of different device ids")
_TEXT: _Check = (_is_text, "a name")
_FLAG: _Check = (lambda v: isinstance(v, bool), "true or false")
_SIZE: _Check = (_is_number, "megabytes, more than 0")
_COUNT: _Check = (lambda v: type(v) is int and v > 0, "an integer of at least 1")
_GROUPS: _Check = (_is_groups, "two or more groups, each a list of filters")

# op -> its fields, those that it must have and those that it may have
FIELDS: dict[str, tuple[dict[str, _Check], dict[str, _Check]]] = {
    "place": ({"filter": _FILTER, "devices": _DEVICES}, {"stream": _TEXT}),
    "replicate": (
        {"filter": _FILTER, "devices": _DEVICES},
        {
            "reduce_stream": _TEXT,
            "gather_stream": _TEXT,
            "bucket_size": _SIZE,
            "shard_grads": _FLAG,
            "shard_params": _FLAG,
        },
    ),
    "shard": ({"filter": _FILTER, "devices": _DEVICES}, {"stream": _TEXT}),
    "split": ({"filter": _FILTER, "dim_name": _TEXT, "num_microbatches": _COUNT}, {}),
    "order": ({"filters": _GROUPS}, {}),
}


def parse(text: str, *, file: str) -> list[Entry]:
    """The entries of a file; raises with the number of the first that is not of the form."""
    too_much = excess(text.encode(errors="replace"))
    if too_much:
        raise StrategyError(f"this is no strategy: {too_much}", call=Call(file))
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise StrategyError(f"this is no JSON: {error}", call=Call(file)) from None
    if not isinstance(entries, list):
        raise StrategyError("this is no list of directives", call=Call(file), legal="[{...}, ...]")
    return [_entry(item, number, file) for number, item in enumerate(entries, 1)]


def _entry(item: Any, number: int, file: str) -> Entry:
    op = item.get("op") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(op, str) or op not in FIELDS:
        near = did_you_mean(op, list(FIELDS)) if isinstance(op, str) else ""
        raise StrategyError(
            f"no directive is called {op!r}{near}" if isinstance(item, dict) else "no object",
            call=Call(f"{file}, entry {number}"),
            legal=f"field 'op' with {', '.join(FIELDS)}",
        )
    fields = {key: value for key, value in item.items() if key != "op" and value is not None}
    entry = Entry(number, op, fields, file)
    needed, optional = FIELDS[op]
    known = needed | optional
    for key in item:
        if key != "op" and key not in known:
            entry.refuse(
                f"no field is called {key!r}{did_you_mean(key, list(known))}",
                legal=", ".join(known),
            )
    for key in needed:
        if key not in fields:
            entry.refuse("it is missing", field=key, legal=known[key][1])
    for key, value in fields.items():
        check, legal = known[key]
        if not check(value):
            entry.refuse(f"{json.dumps(value)}", field=key, legal=legal)
    for field, one in filters_of(entry):
        selector_of(one, entry, field)
    return entry


def filters_of(entry: Entry) -> Iterator[tuple[str, dict[str, Any]]]:
    """All filters of an entry, each with the name of its field."""
    if "filter" in entry.fields:
        yield "filter", entry.fields["filter"]
    for group in entry.fields.get("filters", ()):
        for one in group:
            yield "filters", one


def selector_of(selected: dict[str, Any], entry: Entry, field: str) -> Selector:
    """`{"PP": 0, "EP": null, "PASS": "F"}` -> `where(PP=0, EP=None, phase="F")`."""
    tags: list[tuple[str, int | str | None]] = []
    phase = None
    for tag, value in selected.items():
        if tag == PASS:
            if value not in (*PHASES, ANY):
                legal = f"{', '.join(PHASES)} or {ANY!r}"
                entry.refuse(f"{PASS} is {json.dumps(value)}", field=field, legal=legal)
            phase = None if value == ANY else value
        elif value in ABSENT:
            tags.append((tag, None))
        elif value == ANY or (isinstance(value, int) and not isinstance(value, bool)):
            tags.append((tag, value))
        else:
            legal = 'an integer, "*" (any), or null (no such tag)'
            entry.refuse(f"{tag} is {json.dumps(value)}", field=field, legal=legal)
    return Selector(tuple(tags), phase)


def filter_of(selector: Selector) -> dict[str, Any]:
    """The filter of a selector; one of communication has none."""
    tags: dict[str, Any] = dict(selector.tags)
    return tags | ({PASS: selector.phase} if selector.phase else {})
