"""Watch: what a training says in; the live view of it, which neither ends it nor makes it wait, out."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from piper.api.run import Run
from piper.errors import PiperError, RunError
from piper.training.line import Log
from piper.training.records import Record
from piper.training.watched_steps import WatchedSteps
from piper.view.live.address import DEFAULT, Address, address_of
from piper.view.live.chronicle import Chronicle
from piper.view.live.server import LiveServer
from piper.view.live.step_reports import StepReports
from piper.view.strategy_line import strategy_line

_OPEN = (
    "the live view is served at {host}, not encrypted: who can read this network's traffic can read it, "
    "with its address"
)
MARKED = 200  # recorded steps that charts have a mark for
_CURVES = ("loss", "norm", "lr", "ms", "per_second", "memory", "mfu")


def watched_at(watch: bool | str, every: int | None, log: str | IO[str]) -> Address | None:
    """Where to serve; None if nobody watches."""
    if watch is False:
        if every is not None:
            raise RunError(f"watch_every={every!r} without watch", legal="watch=True (--watch)")
        return None
    if every is not None and (not isinstance(every, int) or every < 0):
        raise RunError(
            f"watch_every={every!r}", legal="steps between recorded ones; 0 records none"
        )
    if log == "none":
        raise RunError(
            "watch with log='none': nobody would learn the address of the live view",
            legal="log='text', where log_every=N leaves out steps; or log='json'",
        )
    if watch is not True and not isinstance(watch, str):
        raise RunError(f"watch={watch!r}", legal=f'True, False, or "HOST:PORT" such as "{DEFAULT}"')
    return address_of(DEFAULT if watch is True else watch)


class Watch:
    """Without an address, or in a process that does not speak, it serves nothing. What goes wrong here
    is one warning, and the live view is closed."""

    def __init__(self, address: Address | None, every: int | None, *, speaks: bool) -> None:
        self.steps = WatchedSteps(0 if address is None else every)
        self.chronicle, self.reports = Chronicle(), StepReports()
        self.server: LiveServer | None = None
        self.lines: Log | None = None
        self.state = ""
        self.has_curves = False
        self.recorded: deque[int] = deque(maxlen=MARKED)
        if address is not None and speaks:
            self.server = LiveServer(address, self.chronicle, self.reports)

    def listen(self, lines: Log) -> None:
        """To a log; the first one says where to look."""
        if self.server is None:
            return
        first, self.lines = self.lines is None, lines
        lines.listener = self.hear
        with self._safely():
            self._set_state("starting")
            if first:
                lines.watch(self.server.url)
                if not self.server.address.is_loopback:
                    lines.warning(0, _OPEN.format(host=self.server.address.host))

    def begin(self, run: Run, facts: Mapping[str, Any], records: Sequence[Record]) -> None:
        """A run begins, after the steps of some records."""
        self.steps.begin(run, facts["step"], facts["steps"])
        if self.server is None:
            return
        with self._safely():
            plan = run.plan
            self.reports.title = strategy_line(plan)
            for record in () if self.has_curves else records:
                self.chronicle.numbers(record.step, _values(record.facts()))
                if record.evaluation is not None:
                    values = _evaluation(record.evaluation, record.evaluation_metrics)
                    self.chronicle.numbers(record.step, values)
            self.has_curves = True
            more = {"title": self.reports.title, "device": plan.device, "begun": time.time()}
            more |= {"precision": str(plan.precision), "records": self.steps.every != 0}
            self.chronicle.begin(facts["step"], {**facts, **more})

    @property
    def waits(self) -> bool:
        """Whether steps are recorded now and then."""
        return self.steps.every != 0

    def before_step(self, number: int) -> None:
        self.steps.before_step(number)

    def after_step(self, number: int) -> None:
        timeline = self.steps.after_step(number)
        if timeline is None or self.server is None:
            return
        with self._safely():
            self.recorded.append(number)
            facts = {"step": number, "steps": list(self.recorded)}
            self.chronicle.set(
                "recorded", {"number": self.reports.put(timeline, f"step {number}"), **facts}
            )

    def hear(self, facts: Mapping[str, Any], text: str) -> None:
        """What the log is told, whatever it prints of it."""
        with self._safely():
            self._hear(facts["event"], facts, text)
            if self.server and self.server.problem:
                raise self.server.problem

    def _hear(self, event: str, facts: Mapping[str, Any], text: str) -> None:
        if event == "step":
            self.chronicle.numbers(facts["step"], _values(facts), eta=facts["eta"])
            self._set_state("running")
        elif event == "evaluation":
            values = _evaluation(facts["loss"], facts["metrics"])
            self.chronicle.numbers(facts["step"], values)
            self._set_state("running")
        elif event in ("note", "warning", "checkpoint"):
            note = {"kind": event, "text": text, "at": time.time()}
            self.chronicle.note(note)
        elif event == "launch":
            self._set_state("starting", text)
        elif event == "state":
            self._set_state(facts["name"])
        elif event == "end":
            self._set_state("ended", text)

    def failed(self, error: BaseException) -> None:
        """Training ends so."""
        if self.server is None:
            return
        with self._safely():
            if isinstance(error, KeyboardInterrupt):
                self._set_state("interrupted")
            else:
                text = str(error) if isinstance(error, PiperError) else repr(error)
                self._set_state("failed", text)

    def close(self) -> None:
        if self.server is not None:
            with contextlib.suppress(Exception):
                self.server.close()
            self.server = None

    def _set_state(self, name: str, text: str = "") -> None:
        if name != self.state or text:
            self.state = name
            self.chronicle.set("state", {"name": name, "text": text, "at": time.time()})

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.close()
            if self.lines is not None:
                self.lines.listener = None
                why = f"{type(error).__name__}: {error}"
                self.lines.warning(0, f"the live view is closed: {why}; training goes on")


def _values(facts: Mapping[str, Any]) -> dict[str, float | None]:
    found = {name: _number(facts[name]) for name in _CURVES if facts[name] is not None}
    return found | {f"metric {name}": _number(v) for name, v in facts["metrics"].items()}


def _evaluation(loss: Any, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Evaluations have curves of their own beside those of training."""
    values = {"loss": loss, **{f"metric {name}": metrics[name] for name in metrics}}
    return {f"evaluation {name}": _number(value) for name, value in values.items()}


def _number(value: Any) -> float | None:
    """None for what is not finite, which is a text in JSON."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return value if known else None
