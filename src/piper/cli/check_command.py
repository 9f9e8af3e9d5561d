"""`piper check`: prove a saved plan, and show what its ranks need."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from piper.check import check_plan
from piper.cli.json_output import put
from piper.cli.plan_file import read_plans
from piper.ir.form.byte_sizes import parse_size


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        words="PLAN.json [options]",
        examples=("piper check PLAN.json", "piper check PLAN.json --memory-limit 80GiB"),
        help="prove a saved plan and show its memory",
        description="Prove that a plan cannot deadlock, race, leak or lose a gradient.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="as written by piper plan --out")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="refuse a plan whose ranks need more, such as 80GiB"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    limit = None if arguments.memory_limit is None else parse_size(arguments.memory_limit)
    plan, evaluation = read_plans(arguments.plan)
    report = check_plan(plan, memory_limit=limit)
    if evaluation is not None:
        check_plan(evaluation, memory_limit=limit)
    if arguments.json:
        put(asdict(report))
        return 0
    print(f"plan {plan.content_hash()}")
    print(report)
    return 0
