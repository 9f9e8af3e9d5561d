"""Timelines as files: JSON to read, and a compact form for millions of spans."""

from __future__ import annotations

import sys
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgspec

from piper.errors import FileError
from piper.observe.timeline import Column, Label, Source, Timeline, Track

VERSION = 1
MAGIC = b"PIPERTL\n"
_OPENING = b'{"head":'  # of JSON
_NO_PLAN = b"null"
_DAMAGES = (
    msgspec.MsgspecError, ValueError, EOFError, OverflowError, RecursionError, zlib.error
)  # fmt: skip
_SPANS = {"which": "I", "issued": "d", "start": "d", "end": "d", "waited": "d"}


class _TrackHead(msgspec.Struct, frozen=True):
    name: str
    ranks: tuple[int, ...]
    labels: int  # which of the lists of labels
    begins: list[int]
    spans: int
    waited: int
    memory: dict[str, int]  # category -> how many times


class _Head(msgspec.Struct, frozen=True):
    version: int
    source: Source
    steps: list[tuple[float, float]]
    directives: tuple[str, ...]
    plan: str
    clock_error: float
    unit: str
    host_computes: bool
    labels: list[tuple[Label, ...]]  # tracks of one class share them
    tracks: list[_TrackHead]


class _TrackColumns(msgspec.Struct, frozen=True):
    which: list[int]
    issued: list[float]
    start: list[float]
    end: list[float]
    waited: list[float]
    memory: dict[str, tuple[list[float], list[int]]]


class _Document(msgspec.Struct, frozen=True):
    head: _Head
    columns: list[_TrackColumns]
    plan: msgspec.Raw = msgspec.Raw(_NO_PLAN)


def to_json(timeline: Timeline) -> bytes:
    columns = [
        _TrackColumns(
            which=list(track.which),
            issued=list(track.issued),
            start=list(track.start),
            end=list(track.end),
            waited=list(track.waited),
            memory={n: (list(c.times), list(c.nbytes)) for n, c in track.memory.items()},
        )
        for track in timeline.tracks
    ]
    plan = msgspec.Raw(timeline.plan_json or _NO_PLAN)
    return msgspec.json.encode(_Document(_head(timeline), columns, plan))


def to_bytes(timeline: Timeline) -> bytes:
    """The compact form: a head in JSON, then the plan and the columns, each compressed."""
    head = msgspec.json.encode(_head(timeline))
    plan = zlib.compress(timeline.plan_json)
    parts = [MAGIC, len(head).to_bytes(8, "little"), head, len(plan).to_bytes(8, "little"), plan]
    for track in timeline.tracks:
        columns = [getattr(track, name) for name in _SPANS]
        for column in track.memory.values():
            columns += [column.times, column.nbytes]
        for values in columns:
            packed = zlib.compress(_little(values).tobytes(), 1)
            parts += [len(packed).to_bytes(8, "little"), packed]
    return b"".join(parts)


def is_timeline(data: bytes) -> bool:
    """Whether a file that begins so claims to be one."""
    return data.startswith((MAGIC, _OPENING))


def from_bytes(data: bytes) -> Timeline:
    """Of either form."""
    try:
        return _compact(data) if data.startswith(MAGIC) else _from_json(data)
    except _DAMAGES as error:
        raise FileError(f"this is no timeline: {error}") from error


def load_timeline(path: str | Path) -> Timeline:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    return from_bytes(data)


def _head(timeline: Timeline) -> _Head:
    labels = list({id(t.labels): t.labels for t in timeline.tracks}.values())
    number = {id(found): index for index, found in enumerate(labels)}
    tracks = [
        _TrackHead(
            track.name,
            track.ranks,
            number[id(track.labels)],
            track.begins,
            len(track),
            len(track.waited),
            {name: len(column.times) for name, column in track.memory.items()},
        )
        for track in timeline.tracks
    ]
    return _Head(
        VERSION, timeline.source, timeline.steps, timeline.directives, timeline.plan,
        timeline.clock_error, timeline.unit, timeline.host_computes, labels, tracks,
    )  # fmt: skip


def _timeline(head: _Head, tracks: list[Track], plan: bytes) -> Timeline:
    return Timeline(
        head.source, tracks, head.steps, head.directives, head.plan, head.clock_error, head.unit,
        head.host_computes, plan,
    )  # fmt: skip


def _checked(head: _Head) -> _Head:
    if head.version != VERSION:
        raise FileError(f"a timeline of version {head.version}", legal=f"version {VERSION}")
    for track in head.tracks:
        if not 0 <= track.labels < len(head.labels):
            raise FileError(f"{track.name} has no labels")
    return head


def _from_json(data: bytes) -> Timeline:
    document = msgspec.json.decode(data, type=_Document)
    head = _checked(document.head)
    tracks = []
    for found, columns in zip(head.tracks, document.columns, strict=True):
        spans: Any = [array(kind, getattr(columns, name)) for name, kind in _SPANS.items()]
        memory = {
            name: Column(array("d", times), array("q", sizes))
            for name, (times, sizes) in columns.memory.items()
        }
        tracks.append(_track(head, found, spans, memory))
    plan = bytes(document.plan)
    return _timeline(head, tracks, b"" if plan == _NO_PLAN else plan)


def _compact(data: bytes) -> Timeline:
    reader = _Reader(data, len(MAGIC))
    head = _checked(msgspec.json.decode(reader.part(), type=_Head))
    plan = zlib.decompress(reader.part())
    tracks = []
    for found in head.tracks:
        sizes = {"waited": found.waited}
        spans = [reader.column(kind, sizes.get(n, found.spans)) for n, kind in _SPANS.items()]
        memory = {
            name: Column(reader.column("d", size), reader.column("q", size))
            for name, size in found.memory.items()
        }
        tracks.append(_track(head, found, spans, memory))
    if reader.at != len(data):
        raise ValueError("there are bytes behind its end")
    return _timeline(head, tracks, plan)


def _track(head: _Head, found: _TrackHead, spans: list[Any], memory: dict[str, Column]) -> Track:
    labels = head.labels[found.labels]
    which, issued, start, end, waited = spans
    return Track(
        found.name, found.ranks, labels, which, issued, start, end, found.begins, memory, waited
    )


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data = memoryview(data)
        self.at = at

    def part(self) -> memoryview:
        size = int.from_bytes(self.data[self.at : self.at + 8], "little")
        begin = self.at + 8
        if begin + size > len(self.data):
            raise EOFError("it ends too early")
        self.at = begin + size
        return self.data[begin : begin + size]

    def column(self, kind: str, length: int) -> array[Any]:
        found: array[Any] = array(kind)
        found.frombytes(zlib.decompress(self.part()))
        if len(found) != length:
            raise ValueError(f"a column of {len(found)} instead of {length}")
        return _little(found)


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
