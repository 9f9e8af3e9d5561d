"""Rollcall: ranks without a driver tell each other where they are, through a store that all reach."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from piper.runtime.failure.board import Board, Where

STORE_SECONDS = 10


class Rollcall:
    """Ranks post their places all the time. Of a failure only one rank speaks: whoever does so first.

    `board` is an open file with this rank's cells, which others of this machine can look into."""

    def __init__(self, rank: int, num_ranks: int, board: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        store, _, _ = next(dist.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: Any = dist.PrefixStore(f"piper/{attempt}", store)
        self.pulse = 0
        self.store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid(), board]))
        self.post(Where())
        self.store.wait([f"process/{r}" for r in range(num_ranks)])
        self.store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def post(self, where: Where) -> None:
        """Say where this rank is; whoever stops doing so does not run."""
        self.pulse += 1
        self.store.set(f"where/{self.rank}", json.dumps([self.pulse, *astuple(where)]))

    def call(self, seconds: float) -> tuple[list[Where], list[int]]:
        """Where all ranks are, and those that said nothing for some seconds."""
        before = self._posted()
        time.sleep(seconds)
        after = self._posted()
        silent = [
            rank
            for rank, (old, new) in enumerate(zip(before, after, strict=True))
            if old[0] == new[0] and rank != self.rank
        ]
        places = [Where(*posted[1:]) for posted in after]
        for rank in silent:
            places[rank] = self._looked_up(rank) or places[rank]
        return places, silent

    def _looked_up(self, rank: int) -> Where | None:
        """Where a rank of this machine is by its own cells: what it posted may be older."""
        host, pid, board = json.loads(self.store.get(f"process/{rank}"))
        path = f"/proc/{pid}/fd/{board}"
        if host == socket.gethostname() and os.path.exists(path):
            return Board(1, path).snapshot()[0]
        return None

    def _posted(self) -> list[list[int]]:
        return [json.loads(self.store.get(f"where/{rank}")) for rank in range(self.num_ranks)]

    def speaks(self) -> bool:
        """Whether this rank is the one to say what happened."""
        return bool(self.store.add("speaker", 1) == 1)

    def kill(self, rank: int) -> None:
        """End a process of this machine that does not run, for which others would wait long."""
        host, pid, _ = json.loads(self.store.get(f"process/{rank}"))
        if host == socket.gethostname():
            os.kill(pid, signal.SIGKILL)
