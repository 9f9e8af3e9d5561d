"""Programs, graphs, plans, jobs and runs at a prompt: what is shown of them fits a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

import piper
from piper.ir.form.screen import COLUMNS, LINES, listed, on_a_screen
from piper.strategies import parallel
from tests.zoo import CASES, program_of


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, object]]:
    traced = program_of("moe")
    program = traced.apply(parallel(pp=2, dp=2, zero=3, microbatches=4, schedule="zb_h1"))
    job = program.lower(precision="bf16")
    with job.launch("loopback") as run:
        recording = run.record(steps=1)
        run.step(CASES["moe"].batch(0))
        yield {
            "traced": traced,
            "program": program,
            "graph": program.graph,
            "physical": job.graph,
            "job": job,
            "plan": job.plan,
            "run": run,
            "recording": recording,
            "measured": recording.timeline,
            "simulated": job.simulate("cpu"),
        }


CARDS = ("traced", "program", "graph", "physical", "plan", "run")
NAMES = (
    "traced", "program", "graph", "physical", "job", "plan", "run", "recording", "measured",
    "simulated",
)  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_a_notebook_shows_the_same(name: str, shown: dict[str, Any]) -> None:
    found = shown[name]
    card = re.fullmatch(r"<div><b>(.*?)</b>(?:<pre>(.*)</pre>)?</div>", found._repr_html_(), re.S)
    assert card and "<" not in "".join(card.groups(""))
    assert unescape("\n".join(filter(None, card.groups()))) == repr(found)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits(name: str, shown: dict[str, object]) -> None:
    lines = repr(shown[name]).splitlines()
    assert 1 <= len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert str(shown[name]) == repr(shown[name])
    assert " object at 0x" not in lines[0]


def test_it_says_what_matters(shown: dict[str, object]) -> None:
    assert "s.split(where(), 'MB', 4)" in repr(shown["program"])
    assert "mesh pp=2 dp=2 ep=1" in repr(shown["graph"]) and "F[PP=0" in repr(shown["graph"])
    plan = shown["plan"]
    assert isinstance(plan, piper.Plan)
    for name in ("job", "plan", "run"):
        assert plan.content_hash() in repr(shown[name])
    assert "peak of a rank" in repr(shown["job"])


def test_timelines_say_how_much_there_is(shown: dict[str, object]) -> None:
    job, measured = shown["job"], shown["measured"]
    assert isinstance(job, piper.Job)
    assert repr(measured).startswith(
        f"<Timeline of plan {job.plan.content_hash()}, measured: 1 step"
    )
    assert repr(shown["recording"]).startswith("<Recording, over: ")
    assert ", simulated: 2 steps, the last of " in repr(shown["simulated"])


def test_what_does_not_fit_is_counted() -> None:
    text = on_a_screen([f"line {n}" for n in range(1000)], more="all()").splitlines()
    assert len(text) == LINES and text[-1] == f"... and {1000 - LINES + 1} more lines: all()"
    assert on_a_screen(["x" * 200]).splitlines() == ["x" * (COLUMNS - 3) + "...", "..."]
    assert on_a_screen(["a", "b"]) == "a\nb"
    lines = listed(["name"] * 100)
    assert " ".join(lines).split() == ["name"] * 100 and max(map(len, lines)) <= COLUMNS
