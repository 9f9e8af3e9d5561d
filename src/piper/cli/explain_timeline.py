"""`piper explain TIMELINE`: where the time of a step goes, why a rank is idle, what memory is for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from piper.cli.json_output import put
from piper.cli.lowering_options import LOWERING_OPTIONS, lowered
from piper.cli.machine_options import MACHINE_OPTIONS, chosen_machine, names_machine
from piper.cli.plan_file import read_plan
from piper.cli.saved_file import check_same, plan_of
from piper.cli.user_file import STRATEGY_OPTIONS, chosen_strategy, load_file, trace_file
from piper.errors import FileError, OptionError
from piper.insight.causes import Causes
from piper.insight.critical_path import critical_path
from piper.insight.gaps import gap_at, largest_gaps
from piper.insight.memory_peak import memory_peak
from piper.insight.memory_remedies import Lower, possible_remedies, tried_remedies
from piper.insight.memory_text import peak_text, remedies_text
from piper.insight.reason_text import busy_text, chain_text, gap_text, task_text, what_if_text
from piper.insight.step_text import step_text
from piper.insight.suspects import Suspect, suspects
from piper.insight.task_spans import task_spans
from piper.insight.use_of_time import use_of_time
from piper.insight.what_if import what_if_replayed
from piper.observe.timeline import Timeline
from piper.plan.types import Plan
from piper.sim.measured_costs import MeasuredCosts, TypicalCosts, replayed
from piper.sim.simulate import simulate

if TYPE_CHECKING:
    from piper.ir.history import Record

_GAPS = 3
_LINKS = 6


def explain_timeline(arguments: argparse.Namespace, timeline: Timeline) -> int:
    if timeline.unit != "s" or not timeline.steps:
        raise FileError(f"{arguments.file} has no measured or simulated step", legal="one that has")
    plan, lower = _plan(arguments, timeline)
    step = len(timeline.steps) if arguments.step is None else arguments.step
    if not 1 <= step <= len(timeline.steps):
        raise OptionError(f"--step {step}", legal=f"from 1 to {len(timeline.steps)}")
    causes = Causes(plan, timeline, step - 1)
    facts: dict[str, Any] = {"plan": timeline.plan, "step": step, "begin": causes.begin}
    lines: list[str] = []
    asked: tuple[tuple[Any, Callable[..., list[str]]], ...] = (
        (arguments.at, _at),
        (arguments.task, _task),
        (arguments.path, _path),
        (arguments.memory is not None, partial(_memory, lower=lower)),
        (arguments.what_if, _what_if),
    )
    answers = [answer for wanted, answer in asked if wanted] or [_whole]
    for answer in answers:
        lines += answer(arguments, causes, facts)
    if arguments.json:
        put(msgspec.to_builtins(facts))
    else:
        print("\n".join(lines))
    return 0


def _plan(arguments: argparse.Namespace, timeline: Timeline) -> tuple[Plan, Lower | None]:
    """The timeline's plan and, of a FILE.py, who lowers the same program under other directives."""
    of, path = arguments.of, arguments.file
    if of is None or not of.endswith(".py"):
        for name in (*STRATEGY_OPTIONS, *LOWERING_OPTIONS):
            if name not in MACHINE_OPTIONS and getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(f"{option} without FILE.py", legal=f"{path} FILE.py {option}")
        if of is None:
            return plan_of(timeline, path), None
        return check_same(timeline, path, read_plan(of), of), None
    module = load_file(of, "model", "batch", "step")
    of_program = argparse.Namespace(**{**vars(arguments), "file": of})
    program = trace_file(module, of_program, own=False)
    strategy = chosen_strategy(of_program, module)
    job = lowered(program.apply(strategy) if strategy else program, module, arguments)
    plan = check_same(timeline, path, job.plan, of)

    def lower(records: Sequence[Record]) -> Plan:
        return lowered(program.apply(records), module, arguments).plan

    return plan, lower


def _whole(arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any]) -> list[str]:
    """Where the step goes."""
    path = critical_path(causes)
    gaps = largest_gaps(causes, most=_GAPS)
    named = _suspects(arguments, causes)
    facts["seconds"] = causes.end - causes.begin
    facts["tracks"] = use_of_time(causes.timeline, causes.step)
    facts["critical_path"] = {
        "by_kind": path.by_kind, "by_directive": path.by_directive, "by_track": path.by_track
    }  # fmt: skip
    facts["gaps"], facts["suspects"] = gaps, named
    lines = [step_text(causes.plan, causes)]
    if gaps:
        lines.append("largest gaps:")
    for gap in gaps:
        lines += [f"  {line}" for line in gap_text(causes, gap, most=_LINKS)]
    beside = (
        "was predicted" if names_machine(arguments) else "the same takes elsewhere or in most steps"
    )
    lines.append(f"suspects, held to what {beside}:")
    return [*lines, *(f"  {suspect}" for suspect in named), *(() if named else ("  none",))]


def _suspects(arguments: argparse.Namespace, causes: Causes) -> list[Suspect]:
    """Beside a machine's prediction or, without one, beside what is usual for the same code."""
    plan, timeline = causes.plan, causes.timeline
    if names_machine(arguments):
        predicted = simulate(plan, chosen_machine(arguments, plan.device))
        return suspects(causes, Causes(plan, predicted))
    measured = MeasuredCosts(plan, timeline, timeline.settled)
    usual = replayed(plan, timeline, TypicalCosts(measured))
    return suspects(causes, Causes(plan, usual))


def _at(arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any]) -> list[str]:
    rank, _, text = arguments.at.partition(":")
    try:
        number, time = int(rank), float(text)
    except ValueError:
        number, time = -1, math.nan
    if number < 0 or not math.isfinite(time):
        raise OptionError(f"--at {arguments.at} is not understood", legal="RANK:MS, such as 2:12.3")
    time = causes.begin + time / 1e3
    gap = gap_at(causes, number, time)
    facts["gap"] = gap
    return [busy_text(causes, number, time)] if gap is None else list(gap_text(causes, gap))


def _task(arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any]) -> list[str]:
    spans = facts["spans"] = task_spans(causes, arguments.task)
    return [line for span in spans for line in task_text(causes, span)]


def _path(arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any]) -> list[str]:
    path = critical_path(causes)
    facts["path"] = [
        {
            "track": causes.timeline.tracks[part.track].name,
            "task": causes.timeline.tracks[part.track][part.span].label.name,
            "begin": part.begin, "end": part.end, "why": part.why, "runs": part.runs,
        }
        for part in path.segments
    ]  # fmt: skip
    return list(chain_text(causes, path))


def _memory(
    arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any], *, lower: Lower | None
) -> list[str]:
    tracks = causes.timeline.tracks
    rank = None
    if arguments.memory:
        if not arguments.memory.isdigit():
            raise OptionError(
                f"--memory {arguments.memory} is no rank",
                legal="a number, or nothing (FILE.py comes before it)",
            )
        rank = int(arguments.memory)
        causes.timeline.track_of(rank)
    peaks = [
        memory_peak(causes, number)
        for number, track in enumerate(tracks)
        if rank is None or rank in track.ranks
    ]
    peak = max(peaks, key=lambda peak: peak.nbytes)
    if lower is None:
        remedies = possible_remedies(causes.plan, peak.by_category)
    else:
        remedies = tried_remedies(causes.plan, lower, rank=rank)
    facts["memory"], facts["remedies"] = peak, remedies
    return [*peak_text(causes, peak), *remedies_text(remedies)]


def _what_if(arguments: argparse.Namespace, causes: Causes, facts: dict[str, Any]) -> list[str]:
    found = []
    steps = (
        causes.timeline.settled if arguments.step is None else range(causes.step, causes.step + 1)
    )
    for text in arguments.what_if:
        what, equals, factor = text.rpartition("=")
        try:
            value = float(factor) if equals else math.nan
        except ValueError:
            value = math.nan
        if not what or not 0 <= value < math.inf:
            raise OptionError(
                f"--what-if {text} is not understood", legal="NAME=FACTOR, such as all_to_all=0"
            )
        found.append(what_if_replayed(causes.plan, causes.timeline, what, value, steps=steps))
    facts["what_if_steps"] = [step + 1 for step in steps]
    facts["what_if"] = [{**msgspec.to_builtins(each), "gain": each.gain} for each in found]
    return list(what_if_text(found))
