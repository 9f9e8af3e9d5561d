"""Patience: how long a driver waits for ranks that show no progress."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from piper.runtime.failure.board import Board

START_SECONDS = 120
LOAD_SECONDS = 1800  # bodies may be compiled
# A process counts as frozen when its pulse stood still for this part of the time that is allowed.
_FROZEN = 0.75


class Patience:
    """Ends when the board has not changed for `seconds`, or a process did not run for `frozen`."""

    def __init__(self, board: Board, seconds: float, frozen: float) -> None:
        self.board = board
        self.seconds = seconds
        self.frozen = frozen
        now = time.monotonic()
        self.seen, self.since = board.snapshot(), now
        self.pulses, self.beats = board.pulses(), [now] * board.num_ranks

    @classmethod
    def of(cls, board: Board, command: str, timeout: float) -> Patience:
        """That with a command, if steps have `timeout`. Modules that are loaded may keep a process
        from showing its pulse for long."""
        seconds = {
            "step": timeout,
            "fetch": timeout,
            "read": max(timeout, START_SECONDS),  # the file of a data function is imported
            "start": START_SECONDS,
        }.get(command, LOAD_SECONDS)
        return cls(board, seconds, timeout if command == "step" else max(timeout, START_SECONDS))

    def over(self, waiting: Collection[int]) -> dict[str, Any] | None:
        """What is wrong with the ranks that have not answered, if they had time enough."""
        now, seen, pulses = time.monotonic(), self.board.snapshot(), self.board.pulses()
        if seen != self.seen:
            self.seen, self.since = seen, now
        for rank, pulse in enumerate(pulses):
            if pulse != self.pulses[rank]:
                self.beats[rank] = now
        self.pulses = pulses
        still = {rank: now - self.beats[rank] for rank in waiting}
        if now - self.since > self.seconds:
            frozen = [r for r in waiting if still[r] > _FROZEN * min(self.seconds, self.frozen)]
            return {"seconds": self.seconds, "frozen": frozen, "waiting": sorted(waiting)}
        frozen = [rank for rank in waiting if still[rank] > self.frozen]
        return {"seconds": self.frozen, "frozen": frozen} if frozen else None
