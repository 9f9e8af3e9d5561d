"""`piper plan`: compile a FILE under a strategy and show or save the plan."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from piper.cli.user_file import add_program_arguments, load_file, trace_file
from piper.passes.lower import PASSES
from piper.plan.plan_text import plan_to_text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help="compile a model under a strategy")
    add_program_arguments(parser)
    parser.add_argument(
        "-o", "--out", metavar="PLAN.json", help="save the plan, and its bodies beside it"
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "sgd"),
        default="adamw",
        help="whose state counts as memory (default: adamw)",
    )
    parser.add_argument("--tasks", action="store_true", help="print every task of the plan")
    parser.add_argument(
        "--dump-after",
        metavar="PASS",
        choices=[each.name for each in PASSES],
        help=f"print the graph after a pass, and end: {', '.join(each.name for each in PASSES)}",
    )
    parser.add_argument("--timings", action="store_true", help="print what each pass took")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import piper

    module = load_file(arguments.file, "model", "batch", "step")
    program = trace_file(module, arguments)
    if arguments.dump_after:
        print(program.text_after(arguments.dump_after), end="")
        return 0
    job = program.lower(
        optimizer=piper.adamw() if arguments.optimizer == "adamw" else piper.sgd(0.1)
    )
    written = []
    if arguments.out:
        written = [arguments.out, f"{os.path.splitext(arguments.out)[0]}.bodies.json"]
        with open(written[0], "wb") as file:
            file.write(job.plan.to_json())
        with open(written[1], "w") as file:
            json.dump(dict(job.bodies), file)
    if arguments.json:
        plan = job.plan
        facts = {
            "hash": plan.content_hash(),
            "mesh": dict(plan.mesh.axes),
            "num_ranks": plan.mesh.size,
            "num_microbatches": plan.num_microbatches,
            "tasks": {str(part.slice): len(part.tasks) for part in plan.classes},
            "directives": [str(record) for record in plan.history],
            "written": written,
        }
        print(json.dumps(facts))
        return 0
    if program.history:
        print(program.history_as_code())
    print(job.summary())
    if arguments.tasks:
        print(plan_to_text(job.plan))
    if arguments.timings:
        print("\n".join(f"{name:<10} {1e3 * took:9.1f} ms" for name, took in job.seconds.items()))
    for name in written:
        print(f"wrote {name}")
    return 0
