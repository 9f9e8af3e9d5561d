"""Null: a transport that moves no bytes, to measure what everything else costs.

Communication is over when it starts, or takes as long as somebody foresees: on a GPU its stream sleeps,
a host waits for its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter, sleep

import torch
from torch import Tensor

from piper.runtime.transport.transport import Exchange, Pending


@dataclass(frozen=True, slots=True)
class _Done:
    results: list[Tensor]
    due: float = 0.0  # by perf_counter

    def ready(self) -> bool:
        return perf_counter() >= self.due

    def finish(self) -> list[Tensor]:
        rest = self.due - perf_counter() if self.due else 0.0
        if rest > 0:
            sleep(rest)
        return self.results


class NullTransport:
    """Every communication takes the seconds that its task has among `lasts`, or none. Rows that go to
    other ranks come back, and a number that is summed (such as how many targets there are) is 1; all
    other results have the right shapes and hold zeros, in memory that is made once and used in every
    step."""

    def __init__(self, device: str = "cpu", lasts: Mapping[str, float] | None = None) -> None:
        self.device = torch.device(device)
        self.lasts = lasts or {}
        self.ticks = _ticks(self.device) if lasts and self.device.type == "cuda" else 0.0
        self._done: dict[
            int, _Done
        ] = {}  # per exchange of a Worker, which lives as long as it does
        self._kept: list[Exchange] = []

    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        done = self._done_at_once(exchange, tensor, splits, into)
        lasts = self.lasts.get(exchange.task.name, 0.0)
        if not lasts:
            return done
        if self.ticks:
            torch.cuda._sleep(int(lasts * self.ticks))
            return done
        return _Done(done.results, perf_counter() + lasts)

    def _done_at_once(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> _Done:
        if splits is not None or exchange.task.facts.by_rows:
            # What comes is as from neighbours that route their rows alike.
            assert tensor is not None
            [kept] = exchange.outputs
            return _Done([tensor if splits is not None else tensor.reshape(kept.shape)])
        if into is not None:
            return _Done([into.fill_(1) if into.numel() == 1 else into])
        done = self._done.get(id(exchange))
        if done is None:
            self._kept.append(exchange)  # so that no other has its id
            done = self._done[id(exchange)] = _Done(self._results(exchange))
        return done

    def _results(self, exchange: Exchange) -> list[Tensor]:
        return [
            torch.full(
                slot.shape,
                float(exchange.task.facts.sums and math.prod(slot.shape) == 1),
                dtype=getattr(torch, slot.dtype),
                device=self.device,
            )
            for slot in exchange.outputs
        ]


def _ticks(device: torch.device) -> float:
    """Of the clock that a stream sleeps by, in a second."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ticks = 50_000_000
    for _ in range(2):  # the first time it is made ready
        first.record()
        torch.cuda._sleep(ticks)
        last.record()
        torch.cuda.synchronize(device)
    return ticks * 1e3 / float(first.elapsed_time(last))
