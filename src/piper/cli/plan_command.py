"""`piper plan`: compile a FILE under a strategy and show or save the plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.cli.lowering_options import add_lowering_arguments, lowered
from piper.cli.machine_options import add_machine_arguments, given_machine
from piper.cli.stage_lines import note
from piper.cli.user_file import add_program_arguments, import_file, strategy_text, trace_file
from piper.errors import OptionError, PiperError
from piper.passes.lower import PASSES
from piper.plan.report.plan_text import plan_to_text

if TYPE_CHECKING:
    from piper.api.job import Job
    from piper.cost.machine import Machine


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        words="FILE.py|JOB.toml [options]",
        help="compile a model under a strategy",
        description="Compile a training step, prove it, and print its directives, tasks and memory.",
        examples=(
            "piper plan FILE.py --pp 2 --dp 2 --zero 3 --microbatches 4",
            "piper plan FILE.py --pp 2 --out PLAN.json                # for check, explain and train",
            "piper plan FILE.py --dp 8 --machine h100                 # with the step it would take",
        ),
    )
    add_program_arguments(parser)
    group = parser.add_argument_group("plan")
    group.add_argument(
        "-o",
        "--out",
        metavar="PLAN.json",
        help="save the plan with all that check, explain, diff and train need",
    )
    add_lowering_arguments(parser)
    add_machine_arguments(parser.add_argument_group("machine"))
    group.add_argument("--tasks", action="store_true", help="print every task of the plan")
    group.add_argument(
        "--dump-after",
        metavar="PASS",
        choices=[each.name for each in PASSES],
        help=f"print the graph after a pass, and end: {', '.join(each.name for each in PASSES)}",
    )
    group.add_argument("--timings", action="store_true", help="print what each pass took")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out and not arguments.out.endswith(".json"):  # train knows plans by their names
        raise OptionError(f"--out {arguments.out}", legal="a file that ends with .json")
    module = import_file(arguments)
    program = trace_file(module, arguments)
    if arguments.dump_after:
        machine = given_machine(arguments)
        print(program.text_after(arguments.dump_after, machine=machine), end="")
        return 0
    job = lowered(program, module, arguments)
    if arguments.out:
        _save(job, arguments.out)
    written = [arguments.out] if arguments.out else []
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
        put(facts)
        return 0
    print(strategy_text(arguments, program.graph.mesh))
    if program.history:
        print(program.history_as_code())
    print(job.summary())
    machine = given_machine(arguments)
    if machine is not None:
        print(_foreseen(job, machine))
    if arguments.tasks:
        print(plan_to_text(job.plan))
    if arguments.timings:
        print("\n".join(f"{name:<10} {1e3 * took:9.1f} ms" for name, took in job.seconds.items()))
    for name in written:
        print(
            f"wrote {name}; to look at it: piper show {name} --open; "
            f"to train it: piper train {name} --data {arguments.file} --steps 10"
        )
    return 0


def _foreseen(job: Job, machine: Machine) -> str:
    """A step on the machine, and the communication that nothing hides there."""
    from piper.insight.causes import Causes
    from piper.insight.exposed import exposed
    from piper.insight.step_text import exposed_text, show_seconds
    from piper.sim.simulate import simulate

    causes = Causes(job.plan, simulate(job.plan, machine, steps=2))
    step = f"step on {machine.name}: {show_seconds(causes.end - causes.begin)} (simulated)"
    return "\n".join([step, *exposed_text(exposed(causes))])


def _save(job: Job, path: str) -> None:
    """With its evaluation, unless the model cannot be evaluated."""
    try:
        job.evaluation()
    except PiperError as error:
        note(f"saved without an evaluation: {error.message}")
        job.save(path, evaluation=False)
    else:
        job.save(path)
