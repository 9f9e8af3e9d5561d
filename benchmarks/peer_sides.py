"""The processes of both sides, which peers.py keeps from row to row, and what is seen of a side."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from shared_gpu import PiperSide, TorchSide, torch_ranks
from torch_ranks import ANSWER_SECONDS, TorchRanks, start
from transformer import Sizes

import piper
from piper.insight.exposed import exposed
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline_output import save_timeline

BEGIN = time.monotonic()
GPU_PATIENCE = 90  # seconds that an answer of torch's ranks may take
LARGE_EXCHANGE = 4 << 20  # bytes; of smaller ones latency decides
Side = PiperSide | TorchSide


def tell(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


class Kept:
    """Torch's ranks and Piper's pool, of one number of ranks at a time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.num_ranks = 0  # that there are
        self.sizes: Sizes | None = None  # that torch's ranks know
        self._stack = contextlib.ExitStack()
        self._pool: piper.LocalPool | None = None

    def use(self, num_ranks: int, sizes: Sizes, weights: str) -> None:
        """Have this number of ranks, which know this model."""
        if num_ranks != self.num_ranks:
            self.close()
            piper.warm_up()
            made = torch_ranks(self, num_ranks, patience=self._patience)
            self._ranks = self._stack.enter_context(made)
            self.num_ranks = num_ranks
        if sizes != self.sizes:
            start(self._ranks, sizes, weights)
            self.sizes = sizes

    @property
    def _patience(self) -> float:
        return GPU_PATIENCE if self.device == "cuda" else ANSWER_SECONDS

    def torch(self, *, compiles: bool = False) -> TorchRanks:
        """A GPU has no room for Piper's pool beside them: that keeps the memory of its last plan."""
        if self.device == "cuda" and self._pool:
            self._close_pool()
            piper.warm_up()
        self._ranks.patience = ANSWER_SECONDS if compiles else self._patience
        return self._ranks

    def pool(self) -> piper.LocalPool:
        """Made when Piper's turn comes, after torch's ranks, whose daemon of MPS it uses."""
        if self._pool is None:
            shared = self.num_ranks if self.device == "cuda" else 1
            self._pool = piper.LocalPool(self.num_ranks, device=self.device, ranks_per_gpu=shared)
        return self._pool

    def first_loss(self, regime: str) -> float:
        """That of the plain loop in one process, which computes as the others do."""
        ranks = self.torch()
        ranks.ask("plain", "plain", False, regime, ranks=[0])
        (loss,), _ = ranks.steps("plain", 1, ranks=[0])
        ranks.ask("drop", "plain", ranks=[0])
        return loss

    def _close_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool:
            pool.close()

    def close(self) -> None:
        """End all processes; the next use makes new ones."""
        self.num_ranks, self.sizes = 0, None
        with self._stack:  # the daemon of MPS ends last
            self._close_pool()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seen(side: Side, name: str, folder: str | None) -> dict[str, Any]:
    """The peak of its ranks and what it communicates; a folder gets profilers' traces, and Piper's
    timeline."""
    more = {"peak": max(side.peaks())}
    if folder:
        side.trace(name, folder)
    if isinstance(side, PiperSide):
        return more | _recorded(side, folder and f"{folder}/{name}.timeline")
    return more | side.exposed()


def _recorded(side: PiperSide, path: str | None) -> dict[str, float]:
    """Of recorded steps: communication on the rank where most of it is exposed, and how much is, ms; and
    the least that a step could take."""
    recording = side.run.record(2)
    side.steps(2)
    timeline = recording.timeline
    if path:
        save_timeline(timeline, path)
    last = Meetings(timeline, len(timeline.steps) - 1)
    rows = exposed(last)
    return {
        "communication_ms": 1e3 * sum(row.seconds for row in rows),
        "exposed_ms": 1e3 * sum(row.exposed for row in rows),
        "exchange_hidden": _hidden([row for row in rows if row.kind == "all_to_all"]),
        "limit_ms": 1e3 * _limit(last),
    }


def _limit(last: Meetings) -> float:
    """Of the busiest rank: what it computes, or what it moves at the best rate of a large exchange."""
    computed, moved, rate = 0.0, 0, 0.0
    for number, track in enumerate(last.timeline.tracks):
        seconds, nbytes = 0.0, 0
        for span in last.spans[number]:
            label = track.labels[track.which[span]]
            if not label.communicates:
                seconds += track.end[span] - track.start[span]
                continue
            place = Place(number, span)
            took = last.ended(place) - last.began(place)
            nbytes += label.nbytes
            if label.nbytes >= LARGE_EXCHANGE and took > 0:
                rate = max(rate, label.nbytes / took)
        computed, moved = max(computed, seconds), max(moved, nbytes)
    return max(computed, moved / rate if rate else 0.0)


def _hidden(rows: list[Any]) -> float:
    seconds = sum(row.seconds for row in rows)
    return 1 - sum(row.exposed for row in rows) / seconds if seconds else 1.0
