"""The step line: launch progress, steps and evaluations as people read them, or as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any

from piper.errors import RunError
from piper.training.records import Record, Training, json_number, metric_text

LOGS = ("auto", "text", "json", "none")
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Log:
    """Prints what happens. `auto` is text, coloured on a terminal; `json` a JSON object a line, which go
    to stdout or, where a file is given in place of a word, there."""

    def __init__(
        self, kind: str | IO[str] = "auto", *, unit: str = "tokens", out: IO[str] | None = None
    ) -> None:
        if kind not in LOGS and (isinstance(kind, str) or not hasattr(kind, "write")):
            raise RunError(f"log={kind!r}", legal=f"{', '.join(LOGS)}, or an open file")
        self.kind = kind if isinstance(kind, str) else "json"
        self.unit = unit
        self.every = 1  # steps of which one has a line
        # Hears all, also what is not printed.
        self.listener: Callable[[dict[str, Any], str], None] | None = None
        self.out = out or sys.stdout if isinstance(kind, str) else kind
        self.colour = kind == "auto" and self.out.isatty() and "NO_COLOR" not in os.environ

    def launch(self, rank: int, text: str) -> None:
        """What becomes of a rank."""
        self._say({"event": "launch", "rank": rank, "text": text}, f"rank {rank} {text}")

    def note(self, text: str) -> None:
        self._say({"event": "note", "text": text}, text)

    def warning(self, step: int, text: str) -> None:
        facts = {"event": "warning", "step": step, "text": text}
        self._say(facts, f"warning: step {step}: {text}")

    def step(self, record: Record, steps: int | None, eta: float | None) -> None:
        due = not record.step % self.every or record.step in (1, steps) or record.not_finite
        if not due and self.listener is None:
            return
        facts = {
            "event": "step",
            "steps": steps,
            **record.step_facts(),
            "unit": self.unit,
            "eta": eta,
        }
        text = step_text(record, steps, eta, unit=self.unit, colour=self.colour)
        self._say(facts, text, printed=bool(due))

    def evaluation(self, record: Record, num_batches: int, seconds: float) -> None:
        loss, metrics = record.evaluation or 0.0, record.evaluation_metrics
        facts = {
            "event": "evaluation",
            "step": record.step,
            "loss": json_number(loss),
            "metrics": json_number(metrics),
            "batches": num_batches,
            "seconds": seconds,
        }
        text = f"evaluation after step {record.step}: loss {loss:.4f}"
        text += "".join(f", {metric_text(*metric)}" for metric in metrics.items())
        self._say(facts, f"{text} ({num_batches} batches, {seconds:.1f} s)")

    def checkpoint(self, facts: dict[str, Any]) -> None:
        """What was saved: its step, folder, bytes, and the seconds for which training waited."""
        size, waited = facts["bytes"] / 2**20, 1e3 * facts["seconds"]
        text = f"saved step {facts['step']} in {facts['folder']} ({size:.1f} MiB, {waited:.0f} ms)"
        self._say({"event": "checkpoint", **facts}, text)

    def end(self, training: Training) -> None:
        facts = {
            "event": "end",
            "steps": len(training.records),
            "seconds": training.seconds,
            "loss": json_number(training.loss),
            "evaluation": json_number(training.evaluation),
        }
        self._say(facts, training.as_text())

    def watch(self, url: str) -> None:
        """Where the live view is."""
        self._say({"event": "watch", "url": url}, f"watch it at {url}")

    def state(self, name: str) -> None:
        """What training does from now on beside steps; nothing is printed."""
        self._say({"event": "state", "name": name}, name, printed=False)

    def _say(self, facts: dict[str, Any], text: str, *, printed: bool = True) -> None:
        if self.listener is not None:
            self.listener(facts, text)
        if self.kind != "none" and printed:
            line = json.dumps(facts) if self.kind == "json" else text
            print(line, file=self.out, flush=True)


def step_text(
    record: Record, steps: int | None, eta: float | None, *, unit: str, colour: bool = False
) -> str:
    """`step  7/60  loss 3.1416  norm 0.92  lr 3.0e-03  41 ms  12.5k tokens/s  312 MiB  ETA 0:12`."""
    total = "" if steps is None else f"/{steps}"
    step = f"{record.step:>{len(str(steps))}}" if steps else str(record.step)
    words = [("step ", step + total), ("loss ", f"{record.loss:.4f}")]
    words += [(f"{name} ", f"{value:.4g}") for name, value in record.metrics.items()]
    if record.norm is not None:
        words.append(("norm ", f"{record.norm:.3g}"))
    words.append(("lr ", f"{record.lr:.2e}"))
    words.append(("", f"{record.ms:.0f} ms" if record.ms >= 10 else f"{record.ms:.2f} ms"))
    words.append(("", f"{_short(record.per_second)} {unit}/s"))
    if record.mfu is not None:
        words.append(("MFU ", f"{record.mfu:.1%}"))
    words.append(("memory ", _bytes(record.memory)))
    if eta is not None:
        words.append(("ETA ", _clock(eta)))
    if record.not_finite:
        words.append(("", "NOT FINITE"))
    if not colour:
        return "  ".join(label + value for label, value in words)
    return "  ".join(
        f"{_DIM}{label}{_PLAIN}{_BOLD if label == 'loss ' else ''}{value}{_PLAIN}"
        for label, value in words
    )


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return (
                f"{number / size:.3g}{letter}"
                if number < 1e3 * size
                else f"{number / size:.0f}{letter}"
            )
    return f"{number:.3g}"


def _bytes(number: int) -> str:
    if number >= 2**30:
        return f"{number / 2**30:.1f} GiB"
    return f"{number / 2**20:.0f} MiB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
