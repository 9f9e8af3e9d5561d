"""Timelines as files: JSON to read, and a compact form for millions of spans."""

from __future__ import annotations

import sys
import zlib
from array import array
from pathlib import Path
from typing import Annotated, Any

import msgspec

from piper.errors import FileError
from piper.files import PLAN_LIMIT
from piper.observe.label_lists import LabelLists, LabelsOfTracks
from piper.observe.timeline import Column, Label, Source, Timeline, Track

VERSION = 2
MAGIC = b"PIPERTL\n"
_OPENING = b'{"head":'  # of JSON
_NO_PLAN = b"null"
_DAMAGES = (
    msgspec.MsgspecError, ValueError, EOFError, OverflowError, RecursionError, zlib.error
)  # fmt: skip
_FIRSTS = "i"
_SPANS = {"which": "I", "issued": "d", "start": "d", "end": "d", "waited": "d"}


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _TrackHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    ranks: tuple[int, ...]
    labels: _Count  # which of the lists of labels
    firsts: _Count  # how many: for each label who meets, or none
    begins: list[int]
    spans: _Count
    waited: _Count
    memory: dict[str, _Count]  # category -> how many times


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    source: Source
    steps: list[tuple[float, float]]
    directives: tuple[str, ...]
    plan: str
    clock_error: float
    unit: str
    host_computes: bool
    labels: list[tuple[Label, ...]]  # tracks of one class share them, but for who meets
    tracks: list[_TrackHead]


class _TrackColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    firsts: list[int]
    which: list[int]
    issued: list[float]
    start: list[float]
    end: list[float]
    waited: list[float]
    memory: dict[str, tuple[list[float], list[int]]]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    head: _Head
    columns: list[_TrackColumns]
    plan: msgspec.Raw = msgspec.Raw(_NO_PLAN)


def to_json(timeline: Timeline) -> bytes:
    head, firsts = _head(timeline)
    columns = [
        _TrackColumns(
            firsts=list(meeting),
            which=list(track.which),
            issued=list(track.issued),
            start=list(track.start),
            end=list(track.end),
            waited=list(track.waited),
            memory={n: (list(c.times), list(c.nbytes)) for n, c in track.memory.items()},
        )
        for track, meeting in zip(timeline.tracks, firsts, strict=True)
    ]
    plan = msgspec.Raw(timeline.plan_json or _NO_PLAN)
    return msgspec.json.encode(_Document(head, columns, plan))


def to_bytes(timeline: Timeline) -> bytes:
    """The compact form: a head in JSON, the plan and the columns, each compressed."""
    head, firsts = _head(timeline)
    packed = [zlib.compress(msgspec.json.encode(head)), zlib.compress(timeline.plan_json)]
    for track, meeting in zip(timeline.tracks, firsts, strict=True):
        columns = [meeting, *(getattr(track, name) for name in _SPANS)]
        for column in track.memory.values():
            columns += [column.times, column.nbytes]
        packed += [zlib.compress(_little(values).tobytes(), 1) for values in columns]
    parts = (size for part in packed for size in (len(part).to_bytes(8, "little"), part))
    return b"".join((MAGIC, *parts))


def is_timeline(data: bytes) -> bool:
    """Whether a file that begins so claims to be one."""
    return data.startswith((MAGIC, _OPENING))


def from_bytes(data: bytes) -> Timeline:
    """Of either form."""
    try:
        return _compact(data) if data.startswith(MAGIC) else _from_json(data)
    except FileError:
        raise
    except _DAMAGES as error:
        raise FileError(f"this is no timeline: {error}") from error


def load_timeline(path: str | Path) -> Timeline:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    return from_bytes(data)


def _head(timeline: Timeline) -> tuple[_Head, list[array[int]]]:
    """And for each track who meets."""
    lists = LabelLists()
    tracks, all_firsts = [], []
    for track in timeline.tracks:
        number, firsts = lists.add(track.labels)
        memory = {name: len(column.times) for name, column in track.memory.items()}
        tracks.append(
            _TrackHead(
                track.name, track.ranks, number, len(firsts), track.begins, len(track),
                len(track.waited), memory,
            )
        )  # fmt: skip
        all_firsts.append(firsts)
    head = _Head(
        VERSION, timeline.source, timeline.steps, timeline.directives, timeline.plan,
        timeline.clock_error, timeline.unit, timeline.host_computes, lists.lists, tracks,
    )  # fmt: skip
    return head, all_firsts


def _timeline(head: _Head, tracks: list[Track], plan: bytes) -> Timeline:
    return Timeline(
        head.source, tracks, head.steps, head.directives, head.plan, head.clock_error, head.unit,
        head.host_computes, plan,
    )  # fmt: skip


def _checked(head: _Head) -> _Head:
    if head.version != VERSION:
        raise FileError(f"a timeline of version {head.version}", legal=f"version {VERSION}")
    for track in head.tracks:
        if track.labels >= len(head.labels):
            raise FileError(f"a timeline whose {track.name} has no labels")
        if track.firsts not in (0, len(head.labels[track.labels])):
            raise FileError(f"a timeline whose {track.name} does not say of each label who meets")
    return head


def _from_json(data: bytes) -> Timeline:
    document = msgspec.json.decode(data, type=_Document)
    head = _checked(document.head)
    labels = LabelsOfTracks(head.labels)
    tracks = []
    for found, columns in zip(head.tracks, document.columns, strict=True):
        spans: Any = [array(kind, getattr(columns, name)) for name, kind in _SPANS.items()]
        memory = {
            name: Column(array("d", times), array("q", sizes))
            for name, (times, sizes) in columns.memory.items()
        }
        firsts = array(_FIRSTS, columns.firsts)
        tracks.append(_track(found, labels.of(found.labels, firsts), spans, memory))
    plan = bytes(document.plan)
    return _timeline(head, tracks, b"" if plan == _NO_PLAN else plan)


def _compact(data: bytes) -> Timeline:
    reader = _Reader(data, len(MAGIC))
    head = _checked(msgspec.json.decode(reader.unpacked(PLAN_LIMIT), type=_Head))
    plan = reader.unpacked(PLAN_LIMIT)
    labels = LabelsOfTracks(head.labels)
    tracks = []
    for found in head.tracks:
        sizes = {"waited": found.waited}
        firsts = reader.column(_FIRSTS, found.firsts)
        spans = [reader.column(kind, sizes.get(n, found.spans)) for n, kind in _SPANS.items()]
        memory = {
            name: Column(reader.column("d", size), reader.column("q", size))
            for name, size in found.memory.items()
        }
        tracks.append(_track(found, labels.of(found.labels, firsts), spans, memory))
    if reader.at != len(data):
        raise ValueError("there are bytes behind its end")
    return _timeline(head, tracks, plan)


def _track(
    found: _TrackHead, labels: tuple[Label, ...], spans: list[Any], memory: dict[str, Column]
) -> Track:
    which, issued, start, end, waited = spans
    return Track(
        found.name, found.ranks, labels, which, issued, start, end, found.begins, memory, waited
    )


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data = memoryview(data)
        self.at = at

    def unpacked(self, limit: int) -> bytes:
        """The next part, which is at most so many bytes."""
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(self._part(), limit + 1)
        if len(data) > limit:
            raise ValueError(f"a part of more than {limit} bytes")
        if not unpacking.eof or unpacking.unused_data:
            raise EOFError("a part that does not end where it should")
        return data

    def _part(self) -> memoryview:
        size = int.from_bytes(self.data[self.at : self.at + 8], "little")
        begin = self.at + 8
        if begin + size > len(self.data):
            raise EOFError("it ends too early")
        self.at = begin + size
        return self.data[begin : begin + size]

    def column(self, kind: str, length: int) -> array[Any]:
        found: array[Any] = array(kind)
        found.frombytes(self.unpacked(length * found.itemsize))
        if len(found) != length:
            raise ValueError(f"a column of {len(found)} instead of {length}")
        return _little(found)


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
