"""Times of a device, read from events: here of a device that is not there, with a clock of its own."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from piper.plan.types import bind
from piper.runtime.order.device_order import DeviceOrder
from piper.runtime.record.clocks import Tie
from piper.runtime.record.device_recorder import DeviceRecorder
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of

FASTER = 1 + 2e-4  # than the host's clock
SYNCHRONISED: list[str] = []


class _Clock:
    """Of the host, which may leap, and of a device that runs `faster`."""

    def __init__(self) -> None:
        self.leapt = 0
        self.faster = FASTER

    def now(self) -> int:
        return time.perf_counter_ns() + self.leapt


CLOCK = _Clock()


class _Event:
    """Passes when it is recorded: the device is as fast as its host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.host = -1

    def record(self, stream: Any) -> None:
        self.host = CLOCK.now()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        SYNCHRONISED.append("event")

    def elapsed_time(self, other: _Event) -> float:
        assert self.timed and other.timed and self.host > 0 and other.host > 0
        milliseconds = (other.host - self.host) * CLOCK.faster / 1e6
        (found,) = struct.unpack("f", struct.pack("f", milliseconds))  # as CUDA gives it
        return found


class _Stream:
    def __init__(self, device: Any, priority: int = 0) -> None:
        self.device = device

    def wait_event(self, event: _Event) -> None:
        assert event.host > 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Event", _Event)
    monkeypatch.setattr(cuda, "Stream", _Stream)
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(cuda, "synchronize", lambda device: SYNCHRONISED.append("device"))
    monkeypatch.setattr("piper.runtime.order.device_order._made", {})
    monkeypatch.setattr("piper.runtime.record.device_recorder.perf_counter_ns", CLOCK.now)
    yield
    SYNCHRONISED.clear()
    CLOCK.__init__()


@pytest.mark.parametrize("expected", [2, None])
def test_times_are_those_of_the_host_within_the_error(device: None, expected: int | None) -> None:
    job = program_of("moe").apply(strategy_of("one", "none")).lower(optimizer=ADAMW)
    batches = batches_of("moe")
    tasks = bind(job.plan, 0).tasks
    with job.launch("single") as run:
        (worker,) = run.workers.workers
        worker.order = own = DeviceOrder(worker)
        starts = worker.starts
        recorder = DeviceRecorder(worker, expected)
        assert worker.order is not own and isinstance(worker.order, DeviceOrder)
        SYNCHRONISED.clear()
        for batch in batches[:2]:
            run.step(batch)
        assert not SYNCHRONISED  # the host waits for nothing before the steps are over
        assert not recorder.spare
        recorder.end()
        assert worker.order is own and worker.starts is starts
        found = recorder.times(Tie(1_000, 30))
    assert found.steps == 2
    assert len(found.start) == len(found.end) == len(found.issued) == 2 * len(tasks)
    assert 30 < found.error < 10_000_000
    true = [pairs[step] for step in range(2) for pairs in recorder.events]
    for index, (first, last) in enumerate(true):
        assert abs(found.start[index] - 1_000 - first.host) <= found.error
        assert abs(found.end[index] - 1_000 - last.host) <= found.error
        assert first.host <= found.issued[index] - 1_000 <= last.host
    assert all(a <= b for a, b in zip(found.start, found.end, strict=True))
    blocking = [t.blocks for t in tasks] * 2
    assert [waited > 0 for waited in found.waited] == blocking


def test_times_long_after_the_first_are_rounded_little_and_within_the_error(device: None) -> None:
    job = program_of("moe").apply(strategy_of("one", "none")).lower(optimizer=ADAMW)
    batch, steps, leap = batches_of("moe")[0], 12, 100_000_003_333
    CLOCK.faster = 1.0  # what is off is rounded
    with job.launch("single") as run:
        (worker,) = run.workers.workers
        worker.order = DeviceOrder(worker)
        recorder = DeviceRecorder(worker, steps)
        for _ in range(steps):
            run.step(batch)
            CLOCK.leapt += leap
        recorder.end()
        found = recorder.times(Tie(0, 0))
    hosts = [pair[0].host for pair in recorder.events[0]]
    starts = found.start[:: len(recorder.events)]
    assert all(abs(a - b) <= found.error for a, b in zip(starts, hosts, strict=True))
    assert found.error >= steps * leap * 2.0**-24
    between = [(b - a) - (d - c) for a, b, c, d in
               zip(starts, starts[1:], hosts, hosts[1:], strict=False)]  # fmt: skip
    assert max(map(abs, between)) <= 4_000  # the half of what floats near 100 s are apart


def test_a_device_clock_that_drifts_is_known_to() -> None:
    """What two ties disagree by is part of the error."""
    early, late = Tie(100, 5), Tie(160, 7)
    both = early.until(late)
    assert both == Tie(130, 37)
    assert abs(both.offset - early.offset) + early.error <= both.error
    assert abs(both.offset - late.offset) + late.error <= both.error
