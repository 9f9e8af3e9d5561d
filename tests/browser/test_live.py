"""The live view in a real browser: steps as they come, recorded ones that answer clicks, and the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .chromium import Chromium
from .opened import place_of, state

ROOT = Path(__file__).parents[2]
STRATEGY = ["--pp", "2", "--dp", "2", "--ep", "2", "--zero", "2", "--schedule", "dualpipev"]
CHARTS = {"Loss": "loss", "Tokens per second": "per_second", "Memory": "memory"}
MORE = ["--microbatches", "4", "--clip", "1", "--json", "--watch"]


class Trains:
    """A training in a process of its own, and the address that it printed."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "piper",
                "train",
                "examples/moe_lm.py",
                *STRATEGY,
                *MORE,
                *options,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        lines = self.process.stdout
        events = (json.loads(line) for line in lines)
        self.url = next(event["url"] for event in events if event["event"] == "watch")
        self._rest = threading.Thread(target=lambda: list(lines), daemon=True)
        self._rest.start()

    def end(self, number: int | None = None) -> int:
        """Its exit code, after a signal."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(120)
        self._rest.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def trains() -> Iterator[type[Trains]]:
    started: list[Trains] = []

    class Started(Trains):
        def __init__(self, *options: str) -> None:
            super().__init__(*options)
            started.append(self)

    yield Started
    for each in started:
        each.process.kill()
        each.end()


def _curve(chromium: Chromium, name: str) -> tuple[list[int], list[float]]:
    """Its steps and its values."""
    code = (
        f"(({{ steps, values }}) => [[...steps], [...values]])(piper.training.curves.get('{name}'))"
    )
    steps, values = chromium.evaluate(code)
    return steps, values


def _steps(chromium: Chromium) -> list[int]:
    return _curve(chromium, "loss")[0]


def _blue(chromium: Chromium, chart: str) -> int:
    """Pixels of a chart in the colour of its line."""
    code = """(() => {
      const canvas = document.querySelector("[data-chart='%s'] canvas");
      const { width, height } = canvas;
      const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      const { data } = copy.getImageData(0, 0, width, height);
      let found = 0;
      for (let i = 0; i < data.length; i += 4)
        if (data[i] === 0x25 && data[i + 1] === 0x63 && data[i + 2] === 0xeb) found++;
      return found;
    })()"""
    return int(chromium.evaluate(code % chart))


def test_a_training_is_followed_to_its_end(
    chromium: Chromium, trains: type[Trains], screenshots: Path
) -> None:
    training = trains("--steps", "70", "--evaluate-every", "30", "--watch-every", "10")
    chromium.visit(training.url)
    chromium.wait("piper.training.step >= 5", seconds=60)
    early = _steps(chromium)
    assert early == list(range(1, len(early) + 1))
    for chart, curve in CHARTS.items():
        steps, values = _curve(chromium, curve)
        assert steps[: len(early)] == early and min(values) > 0, chart
        assert _blue(chromium, chart) > 100, chart
        assert chromium.text(f"[data-chart='{chart}'] b"), chart  # the latest number
    assert "DualPipeV · pp 2, dp 2, ep 2 · ZeRO-2 · 4 microbatches" in chromium.text("header")
    assert chromium.text(".pill") in ("running", "evaluating")
    # Points appear, also after the page was loaded again: the history is served.
    chromium.do("reload")
    chromium.wait(f"piper.training.step >= {len(early) + 5}", seconds=60)
    later = _steps(chromium)
    assert later == list(range(1, len(later) + 1)) and len(later) > len(early)
    # The latest recorded step, task by task.
    chromium.wait("piper.training.recorded !== null", seconds=60)
    chromium.do("choose", selector=".look-into")
    chromium.wait("piper.report", seconds=60)
    assert state(chromium, "tab") == "timeline"
    chromium.do("choose", selector="[data-switch='follow']")  # keep this one
    shown = chromium.text(".of-step")
    span = chromium.evaluate(
        "(() => { const t = piper.report.timelines[0].tracks[2];"
        " for (let i = 0; i < t.num; i++) if (t.spanName(i) === 'F[PP=1.0,MB=1]') return i; })()"
    )
    x, y = place_of(chromium, 0, 2, span)
    chromium.do("click", x=x, y=y)
    chromium.wait("document.querySelector('#details h2')?.innerText.includes('F[PP=1.0,MB=1]')")
    assert "It waited for" in chromium.text("#details")
    chromium.do("picture", path=f"{screenshots}/live-span.png")
    chromium.do("press", key="f")
    chromium.wait("piper.viewport.length < piper.report.end / 2 && piper.viewport.goal === null")
    length = chromium.evaluate("piper.viewport.length / piper.report.end")
    # Another step takes its place: zoom, choice and theme stay.
    chromium.do("choose", selector="#theme")
    chromium.do("choose", selector="[data-switch='follow']")
    chromium.wait(f"document.querySelector('.of-step').innerText !== '{shown}'", seconds=60)
    assert chromium.evaluate("piper.viewport.length / piper.report.end") == pytest.approx(
        length, rel=0.05
    )
    chosen = state(chromium, "selection")
    code = "piper.report.timelines[0].tracks[%d].spanName(%d)"
    assert (
        chromium.evaluate(code % (chosen["place"]["track"], chosen["place"]["span"]))
        == "F[PP=1.0,MB=1]"
    )
    assert "F[PP=1.0,MB=1]" in chromium.text("#details h2")
    assert chromium.evaluate("document.documentElement.dataset.theme") == "dark"
    chromium.do("picture", path=f"{screenshots}/live-span-dark.png")
    # The end is said, and what was there stays.
    assert training.end() == 0
    chromium.wait("piper.training.over", seconds=20)
    chromium.do("press", key="1")
    assert chromium.text(".pill") == "ended" and "Ended after" in chromium.text("#training-side")
    assert _steps(chromium) == list(range(1, 71))
    assert chromium.evaluate("piper.training.curves.get('evaluation loss').steps") == [30, 60, 70]
    chromium.do("picture", path=f"{screenshots}/live-end-dark.png")
    chromium.do("choose", selector="#theme")
    chromium.do("move", x=500, y=260)
    chromium.wait("document.querySelector(\"[data-chart='Loss'] b\").innerText !== ''")
    chromium.do("picture", path=f"{screenshots}/live-end-light.png")
    chromium.do("press", key="2")
    chromium.do("press", key="Escape")
    chromium.evaluate("piper.viewport.set(0, piper.report.end)")  # that span was not in the window
    x, y = place_of(chromium, 0, 0, 4)
    chromium.do("click", x=x, y=y)  # without a server
    assert chromium.evaluate("piper.store.state.selection.kind") in ("span", "gap")


def test_a_failure_and_a_lost_connection_are_said(
    chromium: Chromium, trains: type[Trains], screenshots: Path
) -> None:
    training = trains("--steps", "100000", "--watch-every", "2")
    chromium.visit(training.url, theme="dark")
    chromium.wait("piper.training.step >= 5", seconds=60)
    assert not chromium.evaluate("'report' in piper")  # nobody has looked at a recorded step
    assert training.end(signal.SIGINT) == 130
    chromium.wait("piper.training.over", seconds=20)
    assert chromium.text(".pill") == "interrupted"
    chromium.do("picture", path=f"{screenshots}/live-interrupted.png")
    chromium.do("press", key="2")
    assert re.fullmatch(r"step \d+", chromium.text(".of-step"))  # it was fetched at the end
    killed = trains("--steps", "100000", "--watch-every", "0")
    chromium.visit(killed.url)
    chromium.wait("piper.training.step >= 2", seconds=60)
    chromium.do("press", key="2")
    assert "No step is recorded" in chromium.text(".empty")
    killed.end(signal.SIGKILL)
    chromium.wait("document.querySelector('.pill').innerText === 'no connection'", seconds=20)
    assert _steps(chromium)[:2] == [1, 2]  # and what was there stays
    assert all("net::ERR_" in each for each in chromium.leave())  # as it tries to reach the server


def test_a_page_with_another_token_shows_nothing(chromium: Chromium, trains: type[Trains]) -> None:
    training = trains("--steps", "100000", "--watch-every", "0")
    wrong = training.url[:-3] + "xx/"
    with pytest.raises(AssertionError, match="data-ready"):
        chromium.do("open", url=wrong, ms=500)
    assert chromium.text("body").strip() == "forbidden"
    problems = chromium.problems()
    assert problems and all("403" in each for each in problems)
    assert training.end(signal.SIGINT) == 130
