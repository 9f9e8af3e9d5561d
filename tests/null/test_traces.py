"""Trace files have what the timeline has: read back with Perfetto's own protobuf, and as JSON."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

from piper.observe.flows import flows
from piper.observe.timeline import Label, Timeline, Track
from piper.observe.traces import protobuf
from piper.observe.traces.chrome_trace import to_chrome
from piper.observe.traces.perfetto_trace import to_perfetto
from piper.plan.report.task_labels import ClassLabels
from piper.plan.types import Plan
from piper.schedules import replay, schedule
from piper.schedules.table_timeline import table_timeline
from tests.plans import plan_of
from tests.timelines import STEP, many, two_ranks


class _Read:
    """A Perfetto trace, its strings in place."""

    def __init__(self, data: bytes) -> None:
        trace = perfetto.Trace()
        trace.ParseFromString(data)
        first, *packets = trace.packet
        self.descriptors = [p.track_descriptor for p in packets if p.HasField("track_descriptor")]
        self.tracks = {d.uuid: d for d in self.descriptors}
        assert len(self.tracks) == len(self.descriptors)
        strings = first.interned_data
        self.names = {entry.iid: entry.name for entry in strings.event_names}
        self.kinds = {entry.iid: entry.name for entry in strings.event_categories}
        self.keys = {entry.iid: entry.name for entry in strings.debug_annotation_names}
        self.texts = {s.iid: s.str.decode() for s in strings.debug_annotation_string_values}
        self.events: dict[int, list[Any]] = defaultdict(list)
        for packet in packets:
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("track_event"):
                self.events[packet.track_event.track_uuid].append(packet)

    def title(self, uuid: int) -> tuple[str, str]:
        """Process and thread, or the name of another track."""
        track = self.tracks[uuid]
        if track.HasField("thread"):
            (process,) = [
                d.process.process_name
                for d in self.descriptors
                if d.process.pid == track.thread.pid
            ]
            return process, track.thread.thread_name
        return "", track.name

    def slices(self) -> dict[tuple[str, str], list[tuple[str, int, int, Any, Any]]]:
        """Name, begin, end and both events of all slices, which follow each other on their tracks."""
        found = {}
        for uuid, packets in self.events.items():
            if self.tracks[uuid].HasField("counter"):
                continue
            times = [packet.timestamp for packet in packets]
            assert times == sorted(times)
            kinds = [packet.track_event.type for packet in packets]
            assert kinds == [1, 2] * (len(kinds) // 2)  # begin, end, begin, end
            found[self.title(uuid)] = [
                (
                    self.names[b.track_event.name_iid],
                    b.timestamp,
                    e.timestamp,
                    b.track_event,
                    e.track_event,
                )
                for b, e in zip(packets[::2], packets[1::2], strict=True)
            ]
        return found

    def arguments(self, annotations: Any) -> dict[str, Any]:
        return {self.keys[a.name_iid]: self._value(a) for a in annotations}

    def _value(self, annotation: Any) -> Any:
        if annotation.dict_entries:
            return self.arguments(annotation.dict_entries)
        if annotation.HasField("int_value"):
            return annotation.int_value
        return self.texts[annotation.string_value_iid]


def _streams(slices: dict[tuple[str, str], list[Any]]) -> dict[tuple[str, str], list[Any]]:
    return {title: found for title, found in slices.items() if title[0]}


def test_a_perfetto_trace_has_all_spans_where_they_belong() -> None:
    timeline = two_ranks()
    slices = _Read(to_perfetto(timeline)).slices()
    streams = _streams(slices)
    assert sum(map(len, streams.values())) == timeline.num_spans
    for track in timeline.tracks:
        for stream in track.streams:
            wanted = sorted(
                (s.label.name, round(s.start * 1e9), round(s.end * 1e9))
                for s in track
                if s.label.stream == stream
            )
            lanes = [v for (p, t), v in streams.items() if p == track.name and t.startswith(stream)]
            assert sorted(s[:3] for lane in lanes for s in lane) == wanted
    assert ("rank 0", "p2p 2") in streams  # messages overlap
    assert ("rank 0", "compute 2") not in streams
    assert [s[:3] for s in slices["", "steps"]] == [
        ("step 0", 0, 18_000_000),
        ("step 1", round(STEP * 1e9), round(STEP * 1e9) + 18_000_000),
    ]


def test_slices_say_what_they_are_of() -> None:
    read = _Read(to_perfetto(two_ranks()))
    slices = read.slices()
    forward = slices["rank 1", "compute"][0]
    assert forward[0] == "F[PP=1,MB=0]"
    assert [read.kinds[iid] for iid in forward[3].category_iids] == ["F"]
    assert read.arguments(forward[3].debug_annotations) == {
        "kind": "run",
        "directive": "the traced program",
        "phase": "F",
        "microbatch": 0,
        "tags": {"MB": 0, "PP": 1},
    }
    reduction = slices["rank 0", "dp"][0][3]
    assert read.arguments(reduction.debug_annotations) == {
        "kind": "all_reduce",
        "directive": 's.replicate(where(), over="dp")',
        "bytes": 4096,
        "communication": "g",
    }
    step = read.arguments(slices["", "steps"][0][3].debug_annotations)
    assert step == {"source": "simulated", "plan": "abc", "clock error ns": 2000}


def test_flows_lead_from_sends_to_receives_and_through_collectives() -> None:
    slices = _Read(to_perfetto(two_ranks())).slices()
    seen = defaultdict(list)  # flow -> (time, name, whether it ends there), as a viewer meets them
    for (process, _), found in slices.items():
        for name, begin, end, first, last in found:
            for event, when in ((first, begin), (last, end)):
                for flow in event.flow_ids:
                    seen[flow].append((when, f"{process} {name}", False))
                for flow in event.terminating_flow_ids:
                    seen[flow].append((when, f"{process} {name}", True))
    chains = [sorted(places) for places in seen.values()]
    assert all([ends for *_, ends in chain] == [False, True] for chain in chains)
    assert sorted((a[1], b[1]) for a, b in chains) == [
        ("rank 0 all_reduce>g", "rank 1 all_reduce>g"),
        ("rank 0 all_reduce>g", "rank 1 all_reduce>g"),
        ("rank 0 send>x[MB=0]", "rank 1 recv>x[MB=0]"),
        ("rank 0 send>x[MB=0]", "rank 1 recv>x[MB=0]"),
        ("rank 0 send>x[MB=1]", "rank 1 recv>x[MB=1]"),
        ("rank 0 send>x[MB=1]", "rank 1 recv>x[MB=1]"),
    ]


def test_memory_is_a_counter_for_each_category() -> None:
    timeline = two_ranks()
    read = _Read(to_perfetto(timeline))
    counters = {
        (read.tracks[d.parent_uuid].process.process_name, d.name): d
        for d in read.descriptors
        if d.HasField("counter")
    }
    assert len(counters) == 4
    for track in timeline.tracks:
        for kind, column in track.memory.items():
            descriptor = counters[track.name, f"memory {kind}"]
            assert descriptor.counter.unit == perfetto.CounterDescriptor.UNIT_SIZE_BYTES
            events = read.events[descriptor.uuid]
            assert [e.track_event.counter_value for e in events] == list(column.nbytes)
            assert [e.timestamp for e in events] == [round(t * 1e9) for t in column.times]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zbv"])
def test_a_table_is_a_trace_too(name: str) -> None:
    table = schedule(name, num_ranks=4, num_microbatches=8)
    streams = _streams(_Read(to_perfetto(table_timeline(table, replay(table)))).slices())
    assert [len(streams[f"rank {r}", "compute"]) for r in range(4)] == [len(r) for r in table.rows]
    last = max(s[2] for found in streams.values() for s in found)
    assert last == replay(table).makespan * 1e6


def test_classes_and_early_clocks() -> None:
    labels = (Label("F", "run", "compute", "F"),)
    track = Track("pp=0", (0, 1, 2, 3), labels, begins=[0])
    track.add(0, -0.001, -0.001, 0.001)
    track.add(0, 0.001, 0.001, 0.001)
    data = to_perfetto(Timeline("measured", [track], [(0.0, 0.001)]))
    slices = _Read(data).slices()["pp=0 (4 ranks: 0 to 3)", "compute"]
    assert [s[1:3] for s in slices] == [(0, 2_000_000), (2_000_000, 2_000_000)]


def _tasks_in_turn(plan: Plan, *, by_rank: bool) -> Timeline:
    """Every task of a plan for one unit of time, one after the other: all that flows ask for."""
    tracks = []
    for found in plan.classes:
        ranks = tuple(plan.mesh.ranks(found.slice))
        for members in [(rank,) for rank in ranks] if by_rank else [ranks]:
            known = ClassLabels(plan, found)
            labels = known.of_rank(members[0]) if by_rank else known.of_class
            track = Track(str(members), members, labels, begins=[0])
            for index in range(len(labels)):
                track.add(index, index, index, index + 1)
            tracks.append(track)
    return Timeline("simulated", tracks, [(0.0, 1.0)])


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("name", ["pp_dp_ep", "zero3", "clipped"])
def test_flows_of_a_plan_join_the_ranks_that_meet(name: str, by_rank: bool) -> None:
    plan = plan_of(name)
    timeline = _tasks_in_turn(plan, by_rank=by_rank)
    spans = [span for track in timeline.tracks for span in track]
    received = collective = 0
    for flow in flows(timeline):
        ends = [(timeline.tracks[p.track], timeline.tracks[p.track][p.span]) for p in flow.places]
        assert len({span.label.meeting for _, span in ends}) == 1
        if flow.message:
            (sender, sent), (receiver, got) = ends
            assert (sent.label.kind, got.label.kind) == ("send", "recv")
            received += 1
            if by_rank:  # equal coordinates on all axes but pp
                one, other = (plan.mesh.coordinates(t.ranks[0]) for t in (sender, receiver))
                assert one | {"pp": 0} == other | {"pp": 0}
        else:
            (kind,) = {span.label.kind for _, span in ends}
            assert kind not in ("send", "recv")
            collective += len(ends)
    kinds = [span.label.kind for span in spans if span.label.communicates]
    assert received == kinds.count("recv") > 0
    if by_rank:
        assert collective == len(kinds) - kinds.count("recv") - kinds.count("send") > 0


def test_one_class_may_send_to_several() -> None:
    def track(rank: int, receives: bool) -> Track:
        kind = "recv" if receives else "send"
        label = Label("x", kind, "p2p", meeting="x", receives=receives)
        made = Track(f"rank {rank}", (rank,), (label,), begins=[0])
        made.add(0, 0.0, 0.0, 1.0)
        return made

    tracks = [track(0, True), track(1, False), track(2, True)]
    found = [tuple(p.track for p in f.places) for f in flows(Timeline("table", tracks, [(0, 1)]))]
    assert found == [(1, 0), (1, 2)]
    assert list(flows(Timeline("table", tracks[::2], [(0, 1)]))) == []


def test_chrome_has_the_contents_of_perfetto() -> None:
    timeline = two_ranks()
    slices = _Read(to_perfetto(timeline)).slices()
    events = json.loads(to_chrome(timeline))["traceEvents"]
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    processes = {e["pid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in by_phase["X"]:
        place = (processes[event["pid"]], threads.get(event["tid"], ""))
        begin, end = event["ts"] * 1e3, (event["ts"] + event["dur"]) * 1e3
        found[place].append((event["name"], round(begin), round(end)))
    steps = found.pop(("steps", ""))
    assert steps == [s[:3] for s in slices["", "steps"]]
    assert found == {title: [s[:3] for s in v] for title, v in _streams(slices).items()}
    (forward,) = [e for e in by_phase["X"] if e["name"] == "F[PP=1,MB=1]" and e["ts"] < 2e4]
    assert forward["args"]["tags"] == {"MB": 1, "PP": 1} and forward["cat"] == "F"

    assert len(by_phase["s"]) == len(by_phase["f"]) == 6
    for begin, end in zip(by_phase["s"], by_phase["f"], strict=True):
        assert begin["id"] == end["id"] and begin["ts"] <= end["ts"] and end["bp"] == "e"
        for event in (begin, end):  # inside of the slice that it belongs to
            assert any(
                x["tid"] == event["tid"] and x["ts"] <= event["ts"] <= x["ts"] + x["dur"]
                for x in by_phase["X"]
            )
    memory = [
        e for e in by_phase["C"] if e["name"] == "memory saved" and processes[e["pid"]] == "rank 1"
    ]
    assert [e["args"]["bytes"] for e in memory] == list(timeline.tracks[1].memory["saved"].nbytes)


def test_many_spans_are_written_quickly() -> None:
    timeline = many(100_000)
    begin = time.process_time()
    data = to_perfetto(timeline)
    assert time.process_time() - begin < 6  # a million: well under a minute
    assert len(data) < 100 * timeline.num_spans
    assert sum(map(len, _streams(_Read(data).slices()).values())) == timeline.num_spans


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 1 << 35, (1 << 63) - 1, -1, -(1 << 40)])
def test_numbers_on_the_wire(value: int) -> None:
    event = perfetto.TrackEvent.FromString(protobuf.integer(30, value))
    assert event.counter_value == value
