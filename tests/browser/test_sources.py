"""The user's own line, in a directive's card and for what came from it; without one, what was typed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from examples import moe_lm

import piper
from piper import where
from piper.api.job import load_job
from piper.cli.main import main
from piper.directives.schedule import Schedule

from .chromium import Chromium
from .opened import Opened


def strategy(s: Schedule) -> None:
    mesh = s.mesh(dp=2)
    s.place(where(), mesh.at())
    s.replicate(where(), over="dp")


def _own_line(tmp_path: Path) -> tuple[piper.Job, str]:
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    lines, first = inspect.getsourcelines(strategy)
    place = next(number for number, line in enumerate(lines) if "replicate" in line)
    here = Path(__file__).relative_to(Path.cwd())
    return program.apply(strategy).lower(), f"{here}:{first + place}"


def _options(tmp_path: Path) -> tuple[piper.Job, str]:
    out = str(tmp_path / "plan.json")
    assert main(["plan", moe_lm.__file__, "--dp", "2", "--out", out]) == 0
    return load_job(out), "parallel(dp=2)"


@pytest.mark.parametrize("make", [_own_line, _options])
def test_who_asked_for_it(chromium: Chromium, tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    job, expected = make(tmp_path)
    job.show(tmp_path / "job.html")
    chromium.open(tmp_path / "job.html")
    report = Opened(chromium, job.plan, job.simulate(by_rank=True), shown=0)
    kinds = [record.directive.kind for record in job.plan.history]
    number = kinds.index("replicate")
    chromium.do("press", key="4")
    assert chromium.text(f"[data-directive='{number}'] .source") == expected
    chromium.do("press", key="1")
    track = report.timeline.tracks[1]
    name = next(label.name for label in track.labels if label.origin == number)
    report.click_span(1, report.span(1, name))
    report.heading(name)
    assert report.lines(".directive-line .source") == [expected]
    assert f"({expected}; it changes" in "\n".join(report.lines(".explain td"))
