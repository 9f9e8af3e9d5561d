"""Clocks: which ranks share one, and how far those of other machines are from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

Now = Callable[[], int]
ROUNDS = 50
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Tie:
    """One clock against another, in nanoseconds: what to add to its readings, and how far off the sum
    may be."""

    offset: int
    error: int

    def until(self, later: Tie) -> Tie:
        """For the time between two ties, in which the clocks may drift apart."""
        drift = abs(later.offset - self.offset)
        error = max(self.error, later.error) + (drift + 1) // 2
        return Tie((self.offset + later.offset) // 2, error)


def clock_name() -> str:
    """Of what `perf_counter_ns` reads. Linux counts from the boot, the same for all processes of a
    machine and of one time namespace; elsewhere every process counts as having its own."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without time namespaces
        return boot


def own_tie(now: Now = perf_counter_ns) -> Tie:
    """Of a clock against itself: no better than its readings are apart."""
    return Tie(0, min(-now() + now() for _ in range(ROUNDS)))


def common_tie(name: str | None = None, now: Now = perf_counter_ns) -> Tie:
    """Of this rank's clock against that of rank 0; all ranks of the default group ask together. One
    rank of each other machine asks rank 0 what time it is: half the shortest round trip bounds the
    error."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    names: list[Any] = [None] * num_ranks
    dist.all_gather_object(names, name or clock_name())
    first = {found: names.index(found) for found in names}
    mine = own_tie(now)
    if len(first) == 1:
        return mine
    for asking in list(first.values())[1:]:
        if rank == asking:
            mine = _ask(now)
        elif rank == 0:
            _answer(asking, now)
    ties: list[Any] = [None] * num_ranks
    dist.all_gather_object(ties, mine)
    found: Tie = ties[first[names[rank]]]
    return found


def _ask(now: Now) -> Tie:
    reading = torch.zeros(1, dtype=torch.int64)
    ties = []
    for _ in range(ROUNDS):
        before = now()
        dist.send(reading, 0)
        dist.recv(reading, 0)
        after = now()
        ties.append(Tie(int(reading) - (before + after) // 2, (after - before + 1) // 2))
    return min(ties, key=lambda tie: tie.error)


def _answer(rank: int, now: Now) -> None:
    reading = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(reading, rank)
        reading[0] = now()
        dist.send(reading, rank)
