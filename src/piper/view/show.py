"""Show: a plan, timelines, or both, in; the HTML of their report, out. Where nothing was measured, the
step of the plan is simulated."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from piper.cost.machine import Machine
from piper.cost.machine_file import machine_of
from piper.files import check_writable, write_bytes
from piper.observe.timeline import Timeline
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.view.page import page
from piper.view.report_data import Shown, report_block
from piper.view.strategy_line import strategy_line

_STEPS = 2  # of a simulation: the second has one before it
_BY_RANK = 8  # ranks up to which each has tracks of its own


def show_html(
    plan: Plan | None,
    timelines: Sequence[Shown] = (),
    *,
    machine: Machine | None = None,
    by_rank: bool | None = None,
    title: str = "",
) -> str:
    """A simulation on `machine` stands above the timelines, where one is given."""
    shown = list(timelines)
    if plan is not None and machine is not None:
        shown.insert(
            0, Shown(f"simulated on {machine.name}", _simulated(plan, machine, shown, by_rank))
        )
    title = title or (strategy_line(plan) if plan else shown[0].name)
    return page(report_block(shown, plan=plan, title=title), title=title)


def machine_for(plan: Plan, machine: str | Machine | None) -> Machine:
    """The one that is named, or one of the plan's device."""
    return machine_of(machine or ("h100" if plan.device == "cuda" else "cpu"))


def _simulated(
    plan: Plan, machine: Machine, beside: Sequence[Shown], by_rank: bool | None
) -> Timeline:
    """Rank by rank if the timelines beside it are, or if there are few."""
    if by_rank is None:
        tracks = max((len(each.timeline.tracks) for each in beside), default=0)
        by_rank = plan.mesh.size == tracks if beside else plan.mesh.size <= _BY_RANK
    return simulate(plan, machine, steps=_STEPS, by_rank=by_rank)


def is_page(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name says that a browser opens it."""
    return os.fspath(path).endswith((".html", ".htm"))


def temporary_page() -> Path:
    """Where a page may lie that nobody has named: a folder of its own, which is left there."""
    return Path(tempfile.mkdtemp(prefix="piper-report-")) / "report.html"


def is_seen() -> bool:
    """Whether somebody waits at a prompt or a terminal, beside a display."""
    prompt = hasattr(sys, "ps1") or (sys.stdin.isatty() and sys.stdout.isatty())
    display = "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return prompt and (display or sys.platform in ("darwin", "win32"))


def write_page(html: str, path: str | os.PathLike[str], *, opened: bool = False) -> None:
    """Where it shall be `opened` and no browser is found, it is said where the page lies."""
    check_writable(path)
    write_bytes(path, html.encode())
    page = Path(path).resolve()
    if opened and not webbrowser.open(page.as_uri()):
        print(f"no browser was found here: open {page} in one", file=sys.stderr, flush=True)
