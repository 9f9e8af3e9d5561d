"""Null: a transport that moves no bytes, to measure what everything else costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.transport.transport import Exchange, Pending


@dataclass(frozen=True, slots=True)
class _Done:
    results: list[Tensor]

    def ready(self) -> bool:
        return True

    def finish(self) -> list[Tensor]:
        return self.results


class NullTransport:
    """Every communication is over when it starts. Rows that go to other ranks come back; memory that is
    there already stays as it is, but for single numbers, which become 1 (such as how many targets there
    are). All other results hold zeros, or 1 for a number that is summed, in memory that is made once and
    used in every step."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
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
