"""Alive tensors: a step of a track and its class in; the bytes of each category over time, and from when
to when each tensor is alive, out."""

from __future__ import annotations

import msgspec

from piper.observe.timeline import Track
from piper.plan.local_order import Local
from piper.plan.memory_ledger import CATEGORIES, MemoryLedger
from piper.plan.report.track_memory import moments
from piper.plan.types import Plan
from piper.view.columns import Columns, Ref
from piper.view.span_columns import Clock


class MemoryColumns(msgspec.Struct, frozen=True):
    """`times` and, for each category, `held` from each of them on; `peak` is the most of all together.
    A row of `slot`, `begin`, `end` is a tensor that is alive from one of these times until another, by
    their numbers; a task of `task`, `own` has so many bytes inside while it runs."""

    times: Ref
    held: dict[str, Ref]
    peak: int
    peak_time: int
    slot: Ref
    begin: Ref
    end: Ref
    task: Ref
    own: Ref


class _Watched(MemoryLedger):
    """A ledger that says which slots came to life and which were dropped since it was asked last."""

    def __init__(self, plan: Plan, local: Local) -> None:
        self.made: list[int] = []
        self.dropped: list[int] = []
        super().__init__(plan, local)

    def _make(self, slot: int) -> None:
        root = self.root[slot]
        if not self.alive[root]:
            self.made.append(root)
        super()._make(slot)

    def _drop(self, slot: int) -> None:
        was = self.alive[slot]
        super()._drop(slot)
        if was and not self.alive[slot]:
            self.dropped.append(slot)


class _Lives:
    """Of slots, in numbers of moments."""

    def __init__(self, ledger: _Watched) -> None:
        self.ledger = ledger
        self.rows: list[tuple[int, int, int]] = []
        self.since = {i: 0 for i, alive in enumerate(ledger.alive) if alive}

    def at(self, moment: int) -> None:
        """What has changed by now."""
        ledger = self.ledger
        for slot in ledger.dropped:
            self._over(slot, moment)
        for slot in ledger.made:
            self.since.setdefault(slot, moment)
        ledger.made.clear()
        ledger.dropped.clear()

    def _over(self, slot: int, moment: int) -> None:
        began = self.since.pop(slot, moment)
        if moment > began and self.ledger.size[slot]:
            self.rows.append((slot, began, moment))

    def end(self, moment: int) -> None:
        for slot in list(self.since):
            self._over(slot, moment)


def memory_columns(
    columns: Columns, plan: Plan, local: Local, track: Track, *, step: int, clock: Clock
) -> MemoryColumns:
    ledger = _Watched(plan, local)
    lives = _Lives(ledger)
    times = [0]
    held = {name: [ledger.held[name]] for name in CATEGORIES}
    most, most_at = ledger.total, 0
    own: dict[int, int] = {}
    for time, span, begins in moments(track, step):
        task = track.which[span]
        (ledger.start if begins else ledger.end)(task)
        own[task] = max(own.get(task, 0), ledger.under_way.get(task, 0))
        ticks = clock(time)
        if ticks > times[-1]:
            times.append(ticks)
            for name, rows in held.items():
                rows.append(ledger.held[name])
        else:
            for name, rows in held.items():
                rows[-1] = ledger.held[name]
        lives.at(len(times) - 1)
        if ledger.total > most:
            most, most_at = ledger.total, ticks
    lives.end(len(times))
    inside = sorted((task, nbytes) for task, nbytes in own.items() if nbytes)
    return MemoryColumns(
        times=columns.counts(times),
        held={name: columns.counts(rows) for name, rows in held.items() if any(rows)},
        peak=most,
        peak_time=most_at,
        slot=columns.counts([row[0] for row in lives.rows]),
        begin=columns.counts([row[1] for row in lives.rows]),
        end=columns.counts([row[2] for row in lives.rows]),
        task=columns.counts([task for task, _ in inside]),
        own=columns.counts([nbytes for _, nbytes in inside]),
    )
