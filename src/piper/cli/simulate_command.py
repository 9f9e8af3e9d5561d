"""`piper simulate`: what the steps of a plan would take on a machine, before any of them runs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from piper.cli.device_option import spoken_device
from piper.cli.json_output import put
from piper.cli.lowering_options import add_lowering_arguments, lowered, refuse_with_plan
from piper.cli.machine_options import (
    MACHINE_OPTIONS,
    add_machine_arguments,
    chosen_machine,
    given_machine,
)
from piper.cli.user_file import add_program_arguments, import_file, trace_file
from piper.errors import FileError, OptionError

if TYPE_CHECKING:
    from piper.cost.machine import Machine
    from piper.observe.timeline import Timeline
    from piper.plan.types import Plan
    from piper.sim.disturbances import Disturbance


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        words="FILE.py|JOB.toml|PLAN.json [options]",
        examples=(
            "piper simulate FILE.py --pp 4 --microbatches 8 --machine h100 --gantt",
            "piper simulate PLAN.json --slow-rank 3:1.5 --out STEP.timeline",
        ),
        help="predict what a step takes, and why",
        description="Run the tasks of a plan on a model of a machine.",
    )
    add_program_arguments(parser, more="; or a saved plan (.json)")
    add_lowering_arguments(parser)
    group = parser.add_argument_group("simulation")
    add_machine_arguments(group)
    group.add_argument("--steps", type=int, default=2, metavar="N", help="default: 2")
    group.add_argument("--by-rank", action="store_true", help="a track per rank, not per class")
    group.add_argument(
        "--slow-rank", action="append", default=[], metavar="RANK:FACTOR",
        help="a rank whose computation takes longer",
    )  # fmt: skip
    group.add_argument(
        "--slow-link", action="append", default=[], metavar="A-B:FACTOR",
        help="two ranks whose communication takes longer",
    )  # fmt: skip
    group.add_argument(
        "--slow-body", action="append", default=[], metavar="NAME:FACTOR",
        help="tasks whose names begin so take longer, such as F[PP=1",
    )  # fmt: skip
    group.add_argument(
        "--jitter",
        type=float,
        metavar="X",
        help="every task takes longer at random, X of it on average",
    )
    group.add_argument(
        "-o", "--out", action="append", default=[], metavar="FILE",
        help="write the timeline: .timeline, .json, .svg, .pftrace, .chrome.json",
    )  # fmt: skip
    group.add_argument(
        "--expected", action="store_true",
        help="not the plan, but the step that tasks are put in order for",
    )  # fmt: skip
    group.add_argument("--gantt", action="store_true", help="draw it here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.insight.causes import Causes
    from piper.insight.step_text import step_text
    from piper.observe.timeline_output import check_output, save_timeline
    from piper.plan.report.track_memory import fill_memories
    from piper.sim.simulate import simulate

    for path in arguments.out:
        check_output(path)
    if arguments.steps < 1:
        raise OptionError(f"--steps {arguments.steps}", legal="at least 1")
    disturbances = _disturbances(arguments)
    if arguments.expected:
        return _expected(arguments)
    plan = _plan(arguments)
    machine = chosen_machine(arguments, plan.device)
    timeline = simulate(
        plan,
        machine,
        steps=arguments.steps,
        by_rank=arguments.by_rank,
        disturbances=disturbances,
    )
    if arguments.out:
        fill_memories(plan, timeline)
    for path in arguments.out:
        save_timeline(timeline, path)
    causes = Causes(plan, timeline)
    if arguments.json:
        put(_facts(timeline, causes, machine))
        return 0
    if arguments.gantt:
        print(_drawn(timeline))
    print(_named(machine))
    print(step_text(plan, causes))
    for path in arguments.out:
        print(f"wrote {path}")
    return 0


def _named(machine: Machine) -> str:
    source = f": {machine.source}" if machine.source else ""
    return f"machine {machine.name}, {machine.ranks_per_node} ranks a node{source}"


def _expected(arguments: argparse.Namespace) -> int:
    """The step as lowering takes it to be: there is no plan yet."""
    from piper.cost.estimate import NOMINAL
    from piper.insight.step_text import show_seconds, used
    from piper.insight.use_of_time import use_of_time
    from piper.observe.timeline_output import save_timeline

    if arguments.file.endswith(".json"):
        raise FileError(f"{arguments.file} has its order already", legal="FILE.py --expected")
    for name in ("by_rank", "slow_rank", "slow_link", "slow_body", "jitter"):
        if getattr(arguments, name):
            raise OptionError(f"--expected and --{name.replace('_', '-')}", legal="one of them")
    module = import_file(arguments)
    machine = given_machine(arguments) or NOMINAL
    timeline = trace_file(module, arguments).expected(
        device=spoken_device(arguments),
        precision=arguments.precision,
        clip=arguments.clip,
        machine=machine,
    )
    for path in arguments.out:
        save_timeline(timeline, path)
    if arguments.json:
        put(_common_facts(timeline, machine))
        return 0
    if arguments.gantt:
        print(_drawn(timeline))
    print(_named(machine))
    print(f"expected step: {show_seconds(timeline.step_seconds[0])}")
    for line in (*used(use_of_time(timeline)), *(f"wrote {path}" for path in arguments.out)):
        print(line)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.file.endswith(".json"):
        from piper.cli.plan_file import read_plan

        refuse_with_plan(arguments, but=(*MACHINE_OPTIONS, "seed"))
        return read_plan(arguments.file)
    module = import_file(arguments)
    return lowered(trace_file(module, arguments), module, arguments).plan


def _disturbances(arguments: argparse.Namespace) -> list[Disturbance]:
    from piper.sim.disturbances import Jitter, SlowBody, SlowLink, SlowRank

    found: list[Disturbance] = []
    for text in arguments.slow_rank:
        rank, factor = _split(text, "--slow-rank RANK:FACTOR, such as 3:1.5")
        found.append(SlowRank(_number(rank, text), factor))
    for text in arguments.slow_link:
        pair, factor = _split(text, "--slow-link A-B:FACTOR, such as 0-1:4")
        one, _, other = pair.partition("-")
        found.append(SlowLink((_number(one, text), _number(other, text)), factor))
    for text in arguments.slow_body:
        name, factor = _split(text, "--slow-body NAME:FACTOR, such as F[PP=1:2")
        found.append(SlowBody(name, factor))
    if arguments.jitter:
        found.append(Jitter(arguments.jitter, arguments.seed or 0))
    return found


def _split(text: str, legal: str) -> tuple[str, float]:
    name, _, factor = text.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        name, value = "", 0.0
    if not name:
        raise FileError(f"{text!r} is not understood", legal=legal)
    return name, value


def _number(text: str, whole: str) -> int:
    if not text.isdigit():
        raise FileError(f"{text!r} in {whole!r} is no rank", legal="a number")
    return int(text)


def _drawn(timeline: Timeline) -> str:
    from piper.observe.pictures.characters import draw_text

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    begin, end = timeline.steps[-1]
    width = shutil.get_terminal_size((100, 24)).columns
    return draw_text(timeline, width=width, color=color, begin=begin, end=end)


def _common_facts(timeline: Timeline, machine: Machine) -> dict[str, Any]:
    import msgspec

    from piper.insight.use_of_time import use_of_time

    return {
        "machine": {
            "name": machine.name, "ranks_per_node": machine.ranks_per_node, "source": machine.source
        },
        "step_seconds": timeline.step_seconds,
        "tracks": msgspec.to_builtins(use_of_time(timeline)),
    }  # fmt: skip


def _facts(timeline: Timeline, causes: Any, machine: Machine) -> dict[str, Any]:
    import msgspec

    from piper.insight.critical_path import critical_path
    from piper.insight.exposed import exposed

    path = critical_path(causes)
    return {
        "plan": timeline.plan,
        **_common_facts(timeline, machine),
        "exposed": msgspec.to_builtins(exposed(causes)),
        "critical_path": {
            "by_kind": path.by_kind, "by_directive": path.by_directive, "by_track": path.by_track
        },
    }  # fmt: skip
