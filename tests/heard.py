"""A callback that keeps all that it is told."""

from typing import Any

import piper


class Heard(piper.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_start(self, facts: Any) -> None:
        self.events.append(("start", facts))

    def on_step(self, record: Any) -> None:
        self.events.append(("step", record))

    def on_evaluation(self, record: Any) -> None:
        self.events.append(("evaluation", record))

    def on_failure(self, error: BaseException) -> None:
        self.events.append(("failure", error))

    def on_end(self, training: Any) -> None:
        self.events.append(("end", training))

    def of(self, event: str) -> list[Any]:
        return [fact for kind, fact in self.events if kind == event]
