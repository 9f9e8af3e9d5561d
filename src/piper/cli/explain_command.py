"""`piper explain`: one task of a saved plan: who made it, what it waits for and why."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("explain", help="say why a task of a plan is there")
    parser.add_argument("plan", metavar="PLAN.json", help="what `piper plan FILE.py -o` wrote")
    parser.add_argument("node", metavar="NODE", help="a task's name, or its start or end")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.cli.plan_file import read_plan
    from piper.plan.report.explain import explain

    print(explain(read_plan(arguments.plan), arguments.node))
    return 0
