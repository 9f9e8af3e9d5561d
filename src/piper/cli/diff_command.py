"""`piper diff`: what differs between two saved plans; ends with 0 if nothing does, else with 1."""

from __future__ import annotations

import argparse
from typing import Any

DIFFERENT = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("diff", help="compare two plans")
    parser.add_argument("a", metavar="A.json", help="what `piper plan FILE.py -o` wrote")
    parser.add_argument("b", metavar="B.json", help="another one")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.cli.plan_file import read_plan
    from piper.plan.report.diff import diff

    found = diff(read_plan(arguments.a), read_plan(arguments.b))
    if found:
        print(f"A = {arguments.a}\nB = {arguments.b}\n{found}")
    return DIFFERENT if found else 0
