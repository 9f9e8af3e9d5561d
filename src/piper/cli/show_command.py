"""`piper show`: a plan, timelines, or both, as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.cli.machine_options import add_machine_arguments, chosen_machine, names_machine
from piper.errors import FileError, OptionError

if TYPE_CHECKING:
    from piper.cost.machine import Machine
    from piper.plan.types import Plan
    from piper.view.report_data import Shown


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        words="PLAN.json|TIMELINE ... [options]",
        examples=(
            "piper show PLAN.json --open",
            "piper show PLAN.json STEP.timeline --out report.html",
        ),
        help="write a report of a plan or of timelines that a browser opens",
        description="Timeline, memory, communication, graph and directives in one HTML file. The step "
        "of a plan is simulated; with a timeline of the same plan it stands above it.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="PLAN.json|TIMELINE",
        help="what plan -o, simulate -o or train --record wrote; all of one plan",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE.html", help="default: the first file's name with .html"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which step of a timeline, from 1 (default: the last)"
    )
    parser.add_argument(
        "--by-rank", action=argparse.BooleanOptionalAction, default=None,
        help="simulate each rank, or each class of ranks (default: each rank up to 8, or if timelines "
        "are so)",
    )  # fmt: skip
    parser.add_argument("--title", default="", metavar="TEXT", help="default: the strategy")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    add_machine_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.files import check_writable
    from piper.view.show import is_page, show_html, write_page

    out = arguments.out or os.fspath(Path(arguments.files[0]).with_suffix(".html"))
    if not is_page(out):
        raise OptionError(f"--out {out} is no page", legal="FILE.html")
    check_writable(out)
    plan, timelines, simulated = _read(arguments)
    machine: Machine | None = None
    if plan is not None and (simulated or names_machine(arguments)):
        machine = chosen_machine(arguments, plan.device)
    html = show_html(
        plan, timelines, machine=machine, by_rank=arguments.by_rank, title=arguments.title
    )
    write_page(html, out, opened=arguments.open)
    if arguments.json:
        facts = {"file": out, "bytes": len(html), "plan": plan.content_hash() if plan else None}
        put(facts)
    else:
        print(f"wrote {out}, {len(html) / 2**20:.1f} MiB")
    return 0


def _read(arguments: argparse.Namespace) -> tuple[Plan | None, list[Shown], bool]:
    """The plan, the timelines of it, and whether its step is to be simulated: a plan was given, or
    nothing was that could be shown without."""
    from piper.cli.saved_file import check_same, plan_of, read_saved
    from piper.observe.timeline import Timeline
    from piper.view.report_data import Shown

    plan: Plan | None = None
    found: list[tuple[str, Timeline]] = []
    for path in arguments.files:
        saved = read_saved(path)
        if isinstance(saved, Timeline):
            found.append((path, saved))
        elif plan is not None:
            raise FileError(f"{path} is a second plan", legal="one plan, and timelines of it")
        else:
            plan = saved
    given = plan is not None
    for path, timeline in found:
        if plan is None and timeline.plan_json:
            plan = plan_of(timeline, path)
        elif plan is not None and timeline.plan:
            check_same(timeline, path, plan, arguments.files[0])
        elif plan is not None:
            raise FileError(
                f"{path} has no plan with it", legal=f"piper show {path}, without another file"
            )
    shown = [
        Shown(Path(path).name, timeline, _step(arguments, path, timeline))
        for path, timeline in found
    ]
    shown.sort(key=lambda each: each.timeline.source != "simulated")
    return plan, shown, given


def _step(arguments: argparse.Namespace, path: str, timeline: Any) -> int:
    num = len(timeline.steps)
    if arguments.step is None:
        return -1
    if not 1 <= arguments.step <= num:
        raise FileError(f"--step {arguments.step} of {path}", legal=f"from 1 to {num}")
    return int(arguments.step) - 1
