"""Log writers: callbacks that keep what a training says in files, as JSON lines or for TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from piper.errors import FileError, RunError
from piper.training.callbacks import Callback
from piper.training.records import Record, Training, json_number


class JsonLines(Callback):
    """Adds a JSON object with an `event` to a file for all that happens. Training that goes on after an
    earlier step says so by the `step` of its start: lines of later steps before it are void."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def on_start(self, facts: dict[str, Any]) -> None:
        self._add("start", facts)

    def on_step(self, record: Record) -> None:
        self._add("step", record.step_facts())

    def on_evaluation(self, record: Record) -> None:
        metrics = json_number(record.evaluation_metrics)
        facts = {"step": record.step, "loss": json_number(record.evaluation), "metrics": metrics}
        self._add("evaluation", facts)

    def on_checkpoint(self, facts: dict[str, Any]) -> None:
        self._add("checkpoint", facts)

    def on_failure(self, error: BaseException) -> None:
        self._add("failure", {"error": f"{type(error).__name__}: {error}"})

    def on_end(self, training: Training) -> None:
        self._add("end", {"seconds": training.seconds, "loss": json_number(training.loss)})

    def _add(self, event: str, facts: dict[str, Any]) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps({"event": event, **facts}) + "\n")
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from None


class TensorBoard(Callback):
    """Curves of loss, norm, learning rate, speed, memory and evaluation in a folder of TensorBoard's.
    Training that goes on after an earlier step replaces the points of later ones."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.writer: Any = None

    def on_start(self, facts: dict[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError(
                "TensorBoard is not installed", legal="pip install tensorboard, or piper.JsonLines"
            ) from None
        self._close()  # an elastic training begins again
        purge = facts["step"] + 1 if facts["step"] else None
        self.writer = SummaryWriter(self.folder, purge_step=purge)

    def on_step(self, record: Record) -> None:
        facts = {**msgspec.structs.asdict(record), **record.metrics}
        for name, value in facts.items():
            if isinstance(value, int | float) and name not in ("step", "evaluation"):
                self.writer.add_scalar(f"train/{name}", value, record.step)

    def on_evaluation(self, record: Record) -> None:
        for name, value in {"loss": record.evaluation, **record.evaluation_metrics}.items():
            self.writer.add_scalar(f"evaluation/{name}", value, record.step)

    def on_failure(self, error: BaseException) -> None:
        self._close()

    def on_end(self, training: Training) -> None:
        self._close()

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
