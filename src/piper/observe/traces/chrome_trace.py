"""Chrome: a timeline in, the JSON of its trace viewer out, with the contents of the Perfetto trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piper.observe.flows import flows
from piper.observe.timeline import Timeline
from piper.observe.traces.trace_contents import (
    STEPS,
    Contents,
    Process,
    arguments,
    category,
    contents,
    lanes,
    run_arguments,
)


def to_chrome(timeline: Timeline) -> bytes:
    whole = contents(timeline)
    events = [*_steps(whole)]
    for process in whole.processes:
        events += _process(whole, process)
    events += _arrows(whole)
    return b'{"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(events) + b"\n]}\n"


def _steps(whole: Contents) -> Iterator[bytes]:
    """On a process of their own."""
    begins = [begin for begin, _ in whole.steps]
    ends = [end for _, end in whole.steps]
    yield _about(STEPS, 0, "process_name", name="steps")
    for row, steps in enumerate(lanes(range(len(begins)), begins, ends)):
        for step in steps:
            yield _json(
                ph="X", pid=STEPS, tid=row, name=f"step {step}", cat="step", ts=begins[step] / 1e3,
                dur=(ends[step] - begins[step]) / 1e3, args=run_arguments(whole.timeline),
            )  # fmt: skip


def _process(whole: Contents, process: Process) -> Iterator[bytes]:
    number, track = process.number, process.track
    yield _about(number, 0, "process_name", name=process.name)
    yield _about(number, 0, "process_sort_index", sort_index=number)
    named = [
        _json(
            name=label.name,
            cat=category(label),
            args=arguments(whole.timeline, label),
        )[1:]
        for label in track.labels
    ]
    for thread in process.threads:
        yield _about(number, thread.number, "thread_name", name=thread.name)
        yield _about(number, thread.number, "thread_sort_index", sort_index=thread.number)
        for span in thread.spans:
            start, end = process.start[span], process.end[span]
            yield (
                b'{"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,'
                % (number, thread.number, start / 1e3, (end - start) / 1e3)
            ) + named[track.which[span]]
    for kind, column in track.memory.items():
        for time, nbytes in zip(whole.nanoseconds(column.times), column.nbytes, strict=True):
            yield _json(
                ph="C", pid=number, name=f"memory {kind}", ts=time / 1e3, args={"bytes": nbytes}
            )


def _arrows(whole: Contents) -> Iterator[bytes]:
    """A flow is one event in each of its slices."""
    threads = [
        {span: thread.number for thread in process.threads for span in thread.spans}
        for process in whole.processes
    ]
    for number, flow in enumerate(flows(whole.timeline), 1):
        time, last = 0, len(flow.places) - 1
        for index, (track, span) in enumerate(flow.places):
            process = whole.processes[track]
            # A receive may begin before its send: the arrow ends inside of it.
            time = min(max(time, process.start[span]), process.end[span])
            phase = "s" if index == 0 else "f" if index == last else "t"
            event: dict[str, Any] = {
                "ph": phase, "id": number, "pid": process.number, "tid": threads[track][span],
                "name": "message" if flow.message else "collective", "cat": "flow", "ts": time / 1e3,
            }  # fmt: skip
            yield _json(**event, **({"bp": "e"} if phase == "f" else {}))


def _about(process: int, thread: int, what: str, **arguments: str | int) -> bytes:
    return _json(ph="M", pid=process, tid=thread, name=what, args=arguments)


def _json(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)
