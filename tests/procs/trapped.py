"""Worker processes with traps: at a chosen moment they do what workers should not do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from piper.runtime.failure.board import STEP
from piper.runtime.launch.local_pool import LocalPool
from piper.runtime.launch.member import Member
from piper.runtime.launch.process import main

SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


def spring(what: str) -> None:
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    elif what == "raise":
        raise ValueError("sprung")
    elif what == "memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    elif what == "loop":
        _loop()


def _loop() -> NoReturn:
    while True:
        pass


class _Dropped:
    """A send that says it is done, and does nothing."""

    def ready(self) -> bool:
        return True

    def finish(self) -> list[torch.Tensor]:
        return []


class TrappedMember(Member):
    """PIPER_TRAP="RANK COMMAND WHAT" springs in a command; `trap` sets one for a task of a step."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.command = os.environ.get("PIPER_TRAP", "").split()
        self._maybe(rank, "start")
        super().__init__(rank, **options)

    def answer(self, name: str, payload: Any) -> tuple[str, Any]:
        self._maybe(self.rank, name)
        return super().answer(name, payload)

    def _maybe(self, rank: int, command: str) -> None:
        if self.command[:2] == [str(rank), command]:
            spring(self.command[2])

    def trap(self, payload: dict[str, Any]) -> None:
        if payload["rank"] != self.rank:
            return
        worker = self.workers["train"]
        names = [task.name for task in worker.me.tasks]
        index = payload["task"]
        if isinstance(index, str):
            index = names.index(index)
        place = [row[0] for row in worker.order.table].index(index)
        _, start, *rest = worker.order.table[place]
        worker.order.table[place] = (index, self._trapped(start, payload), *rest)

    def _trapped(self, start: Callable[[], Any], payload: dict[str, Any]) -> Callable[[], Any]:
        def trapped() -> Any:
            if self.cells[STEP] == payload["step"]:
                if payload["what"] == "drop":
                    return _Dropped()
                spring(payload["what"])
            return start()

        return trapped


class TrappedPool(LocalPool):
    program = "tests.procs.trapped"

    def trap(self, rank: int, task: str | int, what: str, *, step: int) -> None:
        payload = {"rank": rank, "task": task, "what": what, "step": step}
        self.call("trap", [payload] * self.num_ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], make=TrappedMember)
