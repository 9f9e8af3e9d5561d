"""`piper diff`: what differs between two saved plans or timelines; ends with 0 if nothing does, or 1."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.errors import FileError

if TYPE_CHECKING:
    from piper.observe.timeline import Timeline

DIFFERENT = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        words="A B [options]",
        help="compare two plans, or two timelines",
        description="Print what differs; the exit code is 0 if nothing does, else 1.",
        examples=("piper diff A.json B.json", "piper diff before.timeline after.timeline --json"),
    )
    parser.add_argument("a", metavar="A", help="what plan -o, train --record or simulate -o wrote")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.cli.saved_file import read_saved
    from piper.observe.timeline import Timeline
    from piper.plan.report.diff import diff

    a, b = read_saved(arguments.a), read_saved(arguments.b)
    if isinstance(a, Timeline) and isinstance(b, Timeline):
        return _timelines(arguments, a, b)
    if isinstance(a, Timeline) or isinstance(b, Timeline):
        timeline, plan = (
            (arguments.a, arguments.b) if isinstance(a, Timeline) else (arguments.b, arguments.a)
        )
        raise FileError(
            f"{timeline} is a timeline, {plan} a plan",
            legal=f"two of a kind; `piper simulate {plan} -o FILE.timeline` makes a timeline of a plan",
        )
    found = diff(a, b)
    if arguments.json:
        lines = found.splitlines()
        put({"a": a.content_hash(), "b": b.content_hash(), "differences": lines})
    elif found:
        print(f"A = {arguments.a}\nB = {arguments.b}\n{found}")
    return DIFFERENT if found else 0


def _timelines(arguments: argparse.Namespace, a: Timeline, b: Timeline) -> int:
    import msgspec

    from piper.insight.diff_text import diff_text
    from piper.insight.timeline_diff import timeline_diff

    found = timeline_diff(a, b)
    same = a.steps == b.steps and a.tracks == b.tracks
    if arguments.json:
        put({"a": a.plan, "b": b.plan, **msgspec.to_builtins(found)})
    elif not same:
        print("\n".join((*_head("A", arguments.a, a), *_head("B", arguments.b, b))))
        print("\n".join(diff_text(found)))
    return 0 if same else DIFFERENT


def _head(letter: str, path: str, timeline: Timeline) -> Iterator[str]:
    num = len(timeline.settled)
    steps = f"{num} steps" if num > 1 else "a step"
    yield f"{letter} = {path}: {steps} {timeline.source}, plan {timeline.plan}"
