"""Perfetto: a timeline in, the bytes of a trace out, as ui.perfetto.dev and its tools read them.

A process stands for a track of the timeline and a thread for a stream; memory is a counter per category.
Strings are written once and then named by number. Field numbers are those of perfetto_trace.proto.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from piper.observe.flows import flows
from piper.observe.timeline import Column, Timeline
from piper.observe.traces.protobuf import fixed64, integer, message, text, varint
from piper.observe.traces.trace_contents import (
    Arguments,
    Contents,
    Process,
    arguments,
    category,
    contents,
    lanes,
    run_arguments,
)

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60  # TracePacket
_UUID, _TRACK_NAME, _PROCESS, _THREAD, _PARENT, _COUNTER = 1, 2, 3, 4, 5, 8  # TrackDescriptor
_CATEGORY, _ARGUMENT, _TYPE, _NAME, _TRACK, _VALUE = 3, 4, 9, 10, 11, 30  # TrackEvent
_FLOW, _LAST_OF_FLOW = 47, 48  # TrackEvent
_SLICE_BEGIN, _SLICE_END, _COUNT = 1, 2, 4  # TrackEvent.Type
_CATEGORIES, _NAMES, _KEYS, _TEXTS = 1, 2, 3, 29  # InternedData
_KEY, _INTEGER, _ENTRY, _TEXT = 1, 4, 11, 17  # DebugAnnotation
_SIZE_BYTES = 3  # CounterDescriptor.Unit
_ANEW, _INTERNS = 1, 2  # TracePacket.SequenceFlags

_TIME = integer(_TIMESTAMP, 0)[:-1]
_FRAME = message(_PACKET)[:-1]
_SAME_SEQUENCE = integer(_SEQUENCE, 1) + integer(_FLAGS, _INTERNS)


def to_perfetto(timeline: Timeline) -> bytes:
    whole = contents(timeline)
    writer = _Writer()
    writer.steps(whole)
    begins, ends = _flow_fields(timeline)
    named: dict[int, list[bytes]] = {}  # tracks of one class share labels
    for number, process in enumerate(whole.processes):
        labels = process.track.labels
        if id(labels) not in named:
            named[id(labels)] = [
                writer.named(label.name, category(label), arguments(timeline, label))
                for label in labels
            ]
        parent = writer.process(process)
        writer.threads(process, named[id(labels)], begins[number], ends[number])
        for kind, column in process.track.memory.items():
            writer.counter(parent, kind, whole.nanoseconds(column.times), column)
    return writer.whole()


def _flow_fields(timeline: Timeline) -> tuple[list[dict[int, bytes]], list[dict[int, bytes]]]:
    """What the events of spans' begins and ends say of flows, by track and span.

    A viewer leads a flow from event to event in time. A receive may begin before its send, but it
    ends behind the send's begin.
    """
    begins: list[dict[int, bytes]] = [defaultdict(bytes) for _ in timeline.tracks]
    ends: list[dict[int, bytes]] = [defaultdict(bytes) for _ in timeline.tracks]
    for number, flow in enumerate(flows(timeline), 1):
        *others, last = flow.places
        for place in others:
            begins[place.track][place.span] += fixed64(_FLOW, number)
        (ends if flow.message else begins)[last.track][last.span] += fixed64(_LAST_OF_FLOW, number)
    return begins, ends


class _Writer:
    """One sequence of packets. Tracks are numbered from 1, and so are strings of each kind."""

    def __init__(self) -> None:
        self.packets = bytearray()
        self.strings: dict[int, dict[str, int]] = defaultdict(dict)
        self.tracks = 0

    def whole(self) -> bytes:
        """The strings in front of all that names them."""
        entries = [
            message(kind, integer(1, number), text(2, value))
            for kind, known in self.strings.items()
            for value, number in known.items()
        ]
        flags = integer(_SEQUENCE, 1) + integer(_FLAGS, _ANEW | _INTERNS)
        return message(_PACKET, flags, message(_INTERNED, *entries)) + self.packets

    def steps(self, whole: Contents) -> None:
        begins = [begin for begin, _ in whole.steps]
        ends = [end for _, end in whole.steps]
        shown = run_arguments(whole.timeline)
        for row in lanes(range(len(begins)), begins, ends):
            track = self._track(text(_TRACK_NAME, "steps"))
            for step in row:
                name = self.named(f"step {step}", "step", shown)
                self._packet(begins[step], _event(_SLICE_BEGIN, track, name))
                self._packet(ends[step], _event(_SLICE_END, track))

    def process(self, process: Process) -> int:
        return self._track(message(_PROCESS, integer(1, process.number), text(6, process.name)))

    def threads(
        self,
        process: Process,
        named: list[bytes],
        flow_begins: dict[int, bytes],
        flow_ends: dict[int, bytes],
    ) -> None:
        which, start, end = process.track.which, process.start, process.end
        for thread in process.threads:
            numbers = integer(1, process.number) + integer(2, thread.number)
            track = self._track(message(_THREAD, numbers, text(5, thread.name)))
            plain_end = _event(_SLICE_END, track)
            plain_begins: dict[int, bytes] = {}
            for span in thread.spans:
                label = which[span]
                if span in flow_begins:
                    begin = _event(_SLICE_BEGIN, track, named[label], flow_begins[span])
                elif label in plain_begins:
                    begin = plain_begins[label]
                else:
                    begin = plain_begins[label] = _event(_SLICE_BEGIN, track, named[label])
                self._packet(start[span], begin)
                if span in flow_ends:
                    self._packet(end[span], _event(_SLICE_END, track, flow_ends[span]))
                else:
                    self._packet(end[span], plain_end)

    def counter(self, parent: int, kind: str, times: Iterable[int], column: Column) -> None:
        track = self._track(
            text(_TRACK_NAME, f"memory {kind}"),
            integer(_PARENT, parent),
            message(_COUNTER, integer(3, _SIZE_BYTES)),
        )
        for time, nbytes in zip(times, column.nbytes, strict=True):
            self._packet(time, _event(_COUNT, track, integer(_VALUE, nbytes)))

    def named(self, name: str, kind: str, shown: Arguments) -> bytes:
        """The fields of a begin that all spans of a label share."""
        return b"".join(
            [
                integer(_CATEGORY, self._number(_CATEGORIES, kind)),
                integer(_NAME, self._number(_NAMES, name)),
                *(message(_ARGUMENT, self._argument(k, v)) for k, v in shown.items()),
            ]
        )

    def _argument(self, key: str, value: str | int | dict[str, int]) -> bytes:
        name = integer(_KEY, self._number(_KEYS, key))
        if isinstance(value, str):
            return name + integer(_TEXT, self._number(_TEXTS, value))
        if isinstance(value, int):
            return name + integer(_INTEGER, value)
        return name + b"".join(message(_ENTRY, self._argument(k, v)) for k, v in value.items())

    def _number(self, kind: int, value: str) -> int:
        known = self.strings[kind]
        return known.setdefault(value, len(known) + 1)

    def _track(self, *about: bytes) -> int:
        self.tracks += 1
        descriptor = message(_DESCRIPTOR, integer(_UUID, self.tracks), *about)
        self.packets += message(_PACKET, _SAME_SEQUENCE, descriptor)
        return self.tracks

    def _packet(self, time: int, event: bytes) -> None:
        stamp = varint(time)
        self.packets += _FRAME + varint(len(stamp) + len(event) + 1) + _TIME + stamp + event


def _event(kind: int, track: int, *fields: bytes) -> bytes:
    """All of a packet but its time."""
    return _SAME_SEQUENCE + message(_EVENT, integer(_TYPE, kind), integer(_TRACK, track), *fields)
