"""Wrapped: a Worker in that starts other tasks than its own, until it has its own back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.runtime.worker.handlers import Start
    from piper.runtime.worker.worker import Worker


class Wrapped:
    """The Worker's order is made anew of the tasks that it is given."""

    def __init__(self, worker: Worker, starts: list[Start]) -> None:
        self.worker = worker
        self.own = worker.starts, worker.order
        worker.starts = starts
        try:
            worker.order = type(worker.order)(worker)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.worker.starts, self.worker.order = self.own
