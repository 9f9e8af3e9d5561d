"""`piper explain`: a task of a saved plan, or where the step of a timeline goes and why."""

from __future__ import annotations

import argparse
from typing import Any

from piper.cli.json_output import put
from piper.cli.lowering_options import LOWERING_OPTIONS, add_lowering_arguments
from piper.cli.machine_options import add_machine_arguments
from piper.cli.user_file import STRATEGY_OPTIONS, add_strategy_arguments
from piper.errors import FileError, OptionError

_QUESTIONS = ("at", "task", "path", "memory", "what_if", "step")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        words="PLAN.json TASK | TIMELINE [options]",
        examples=(
            "piper explain PLAN.json 'F[PP=1,MB=0]'",
            "piper explain STEP.timeline --path",
            "piper explain STEP.timeline FILE.py --dp 2 --memory",
        ),
        help="say why a task of a plan is there, or where the time of a step goes",
        description="PLAN.json TASK: who made a task, what it waits for and why. TIMELINE: where the "
        "time of a step goes. With FILE.py and the options of the run, directives that would lower "
        "the peak of memory are tried.",
    )
    parser.add_argument("file", metavar="PLAN.json|TIMELINE", help="what plan -o, train --record or "
                        "simulate -o wrote")  # fmt: skip
    parser.add_argument(
        "of", metavar="TASK|FILE.py", nargs="?",
        help="of a plan: a task's name, or its start or end; of a timeline: FILE.py or PLAN.json",
    )  # fmt: skip
    group = parser.add_argument_group("a timeline")
    group.add_argument(
        "--step", type=int, metavar="N", help="which step, from 1 (default: the last)"
    )
    group.add_argument(
        "--at", metavar="RANK:MS", help="why a rank is idle so many ms after the step's begin"
    )
    group.add_argument("--task", metavar="NAME", help="what a task waited for, and who for it")
    group.add_argument("--path", action="store_true", help="the critical path, part by part")
    group.add_argument(
        "--memory", nargs="?", const="", metavar="RANK",
        help="the peak of memory, and which directive would lower it (default: of the rank with most)",
    )  # fmt: skip
    group.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=FACTOR",
        help="the step if tasks of a kind, phase or directive took FACTOR as long: all_to_all=0",
    )  # fmt: skip
    add_machine_arguments(group)
    add_strategy_arguments(parser)
    add_lowering_arguments(parser)
    parser.set_defaults(run=run, late="of")


def run(arguments: argparse.Namespace) -> int:
    from piper.cli.explain_timeline import explain_timeline
    from piper.cli.saved_file import read_saved
    from piper.observe.timeline import Timeline
    from piper.plan.report.explain import explain

    found = read_saved(arguments.file)
    if isinstance(found, Timeline):
        return explain_timeline(arguments, found)
    for name in (*_QUESTIONS, *STRATEGY_OPTIONS, *LOWERING_OPTIONS):
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option}, but {arguments.file} is a plan",
                legal=f"piper explain TIMELINE {option}",
            )
    if arguments.of is None:
        raise FileError(f"which task of {arguments.file}?", legal="piper explain PLAN.json TASK")
    text = explain(found, arguments.of)
    if arguments.json:
        put({"plan": found.content_hash(), "text": text})
    else:
        print(text)
    return 0
