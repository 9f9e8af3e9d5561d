"""One browser, and reports that are made once: of a run of 4 ranks, and of a plan of 64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples import moe_lm

import piper
from piper.observe.timeline import Timeline
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.strategies import parallel
from piper.view.report_data import Shown
from piper.view.show import machine_for, show_html

from . import deep_moe
from .chromium import HERE, Chromium, require_browser
from .opened import Opened


@pytest.fixture(scope="session", autouse=True)
def _needs_a_browser() -> None:
    require_browser()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Which git ignores."""
    folder = HERE / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def chromium(browser: Chromium) -> Iterator[Chromium]:
    """The browser for one test, which fails if its pages complain of what it has not asked for."""
    yield browser
    assert browser.leave() == []


@pytest.fixture(scope="session")
def recorded() -> tuple[Plan, Timeline]:
    """Two steps of DualPipeV with experts and ZeRO-2 on four processes."""
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, schedule="dualpipev", microbatches=4)
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    with job.launch("local") as run:
        run.step(moe_lm.batch())
        recording = run.record(steps=2)
        for _ in range(2):
            run.step(moe_lm.batch())
    return job.plan, recording.timeline


@pytest.fixture(scope="session")
def both(recorded: tuple[Plan, Timeline], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated step above the measured one."""
    plan, timeline = recorded
    html = show_html(plan, [Shown("recorded", timeline)], machine=machine_for(plan, "cpu"))
    path = tmp_path_factory.mktemp("reports") / "both.html"
    path.write_text(html)
    return path


@pytest.fixture(scope="session")
def large_plan() -> Plan:
    strategy = parallel(pp=8, dp=8, ep=4, zero=2, schedule="dualpipev", microbatches=16)
    program = piper.trace(deep_moe.model, deep_moe.batch(), deep_moe.step)
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3)).plan


@pytest.fixture(scope="session")
def large(large_plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ranks, each with its own tracks."""
    path = tmp_path_factory.mktemp("reports") / "large.html"
    path.write_text(show_html(large_plan, machine=machine_for(large_plan, "h100"), by_rank=True))
    return path


@pytest.fixture
def opened(chromium: Chromium, both: Path) -> Chromium:
    chromium.open(both)
    return chromium


@pytest.fixture(scope="session")
def large_step(large_plan: Plan) -> Timeline:
    return simulate(large_plan, machine_for(large_plan, "h100"), steps=2, by_rank=True)


@pytest.fixture(params=["run", "plan"])
def report(chromium: Chromium, request: pytest.FixtureRequest) -> Opened:
    """The measured step of 4 ranks, on hosts that compute; and the step of 64, simulated on devices that
    hosts give tasks to."""
    known = request.getfixturevalue
    if request.param == "run":
        chromium.open(known("both"))
        return Opened(chromium, *known("recorded"), shown=1)
    chromium.open(known("large"))
    return Opened(chromium, known("large_plan"), known("large_step"), shown=0)
