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
from piper.insight.use_of_time import length, union
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

    def first_losses(self, regime: str, num: int) -> list[float]:
        """Those of the plain loop in one process, which computes as the others do."""
        ranks = self.torch()
        ranks.ask("plain", "plain", False, regime, ranks=[0])
        losses, _ = ranks.steps("plain", num, ranks=[0])
        ranks.ask("drop", "plain", ranks=[0])
        return losses

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
    ranks = [_Rank(last, number) for number in range(len(last.timeline.tracks))]
    rate = max(rank.rate for rank in ranks)
    return {
        "communication_ms": 1e3 * max(length(rank.talking) for rank in ranks),
        "bare_ms": 1e3 * max(rank.bare for rank in ranks),
        "exchange_hidden": hidden([row for row in rows if row.kind == "all_to_all"]),
        "bound_ms": 1e3 * max(rank.least(rate) for rank in ranks),
    }


class _Rank:
    """What a rank computes and moves in a step."""

    def __init__(self, last: Meetings, number: int) -> None:
        track = last.timeline.tracks[number]
        self.nbytes, self.rate = 0, 0.0
        computing, talking = [], []
        for span in last.spans[number]:
            label = track.labels[track.which[span]]
            if not label.communicates:
                computing.append((track.start[span], track.end[span]))
                continue
            place = Place(number, span)
            begin, end = last.began(place), last.ended(place)
            talking.append((begin, end))
            self.nbytes += label.nbytes
            if label.nbytes >= LARGE_EXCHANGE and end > begin:
                self.rate = max(self.rate, label.nbytes / (end - begin))
        self.computing, self.talking = union(computing), union(talking)
        if self.talking:  # exchanges beside each other may be faster than any of them
            self.rate = max(self.rate, self.nbytes / length(self.talking))

    @property
    def bare(self) -> float:
        """Seconds in which it moves data and computes nothing."""
        return length(union([*self.computing, *self.talking])) - length(self.computing)

    def least(self, rate: float) -> float:
        """What it computes, or what it moves at the best rate of any rank."""
        return max(length(self.computing), self.nbytes / rate if rate else 0.0)


def hidden(rows: list[Any]) -> float:
    """The part of their time in which the rank computes."""
    seconds = sum(row.seconds for row in rows)
    return 1 - sum(row.exposed for row in rows) / seconds if seconds else 1.0
