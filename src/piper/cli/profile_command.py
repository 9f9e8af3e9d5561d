"""`piper profile`: measure a machine and some steps on it, and hold them to what is predicted."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.cli.launch_options import add_launch_arguments, launch_options, settle_launch
from piper.cli.lowering_options import add_lowering_arguments, lowered
from piper.cli.machine_options import add_machine_arguments, given_machine
from piper.cli.user_file import add_program_arguments, import_file, trace_file
from piper.errors import FileError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from piper.training.profile import Profile

LAUNCHERS = ("local", "ray", "loopback", "single")
_SHOWN = 12


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        words="FILE.py|JOB.toml [options]",
        examples=(
            "piper profile FILE.py --dp 2 --out machine.json",
            "piper profile FILE.py --dp 2 --machine machine.json",
        ),
        help="measure a machine, and predicted against measured steps",
        description="Calibrate links and bodies, train some steps on one batch, and compare. With "
        "--machine the plan is made for that one and held to it, and nothing is calibrated.",
    )
    add_program_arguments(parser)
    add_launch_arguments(parser.add_argument_group("where"), LAUNCHERS)
    add_lowering_arguments(parser)
    group = parser.add_argument_group("profile")
    group.add_argument("--steps", type=int, default=8, metavar="N", help="measured (default: 8)")
    add_machine_arguments(group)
    group.add_argument(
        "--out", metavar="FILE.json", help="keep the machine, for `--machine` of other commands"
    )
    group.add_argument("--record", metavar="FILE", help="write the measured timeline")
    group.add_argument("--predicted", metavar="FILE", help="write the predicted timeline")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.cost.machine_file import save_machine
    from piper.files import check_writable
    from piper.observe.timeline_output import check_output, save_timeline
    from piper.runtime.launch.parent_process import cool_down, warm_up
    from piper.training.profile import profile

    files = {arguments.record: "measured", arguments.predicted: "predicted"}
    for path in filter(None, files):
        check_output(path)
    if arguments.steps < 1:
        raise OptionError(f"--steps {arguments.steps}", legal="at least 1")
    if arguments.out and not arguments.out.endswith(".json"):
        raise OptionError(f"--out {arguments.out}", legal="--out FILE.json")
    written = [path for path in (arguments.out, arguments.record, arguments.predicted) if path]
    for path in written:
        check_writable(path)
    if len(set(map(os.path.realpath, written))) < len(written):
        raise FileError(f"one file for several: {', '.join(written)}", legal="a file for each")
    settle_launch(arguments, LAUNCHERS)
    options = launch_options(arguments)
    machine = given_machine(arguments)
    if arguments.launch == "local":
        warm_up()
    try:
        module = import_file(arguments)
        job = lowered(trace_file(module, arguments), module, arguments)
        found = profile(
            job,
            module.batch(),
            launch=arguments.launch,
            steps=arguments.steps,
            machine=machine,
            **options,
        )
    finally:
        cool_down()
    if arguments.out:
        save_machine(found.machine, arguments.out)
    for path, name in files.items():
        if path:
            save_timeline(getattr(found, name), path)
    if arguments.json:
        put(facts(found))
        return 0
    print("\n".join(lines(found)))
    for path in written:
        print(f"wrote {path}")
    return 0


def lines(found: Profile) -> Iterator[str]:
    from piper.insight.step_text import show_seconds

    measured, predicted = found.measured_seconds, found.predicted_seconds
    yield (
        f"step: {show_seconds(measured)} measured, {show_seconds(predicted)} predicted "
        f"({found.error:+.1%}); clocks of ranks agree within {show_seconds(found.measured.clock_error)}"
    )
    yield f"  {'kind':<16}{'tasks':>7}{'predicted':>12}{'measured':>12}{'apart':>12}  likely reason"
    for each in found.kinds[:_SHOWN]:
        times = (each.predicted, each.measured, each.apart)
        shown = "".join(f"{show_seconds(time):>12}" for time in times)
        yield f"  {each.kind:<16}{each.tasks or '':>7}{shown}  {each.reason}".rstrip()
    if len(found.kinds) > _SHOWN:
        yield f"  and {len(found.kinds) - _SHOWN} more kinds (--json has all)"
    for suspect in found.suspects:
        yield f"  {suspect}"


def facts(found: Profile) -> dict[str, Any]:
    import msgspec

    return {
        "plan": found.measured.plan,
        "measured_seconds": found.measured_seconds,
        "predicted_seconds": found.predicted_seconds,
        "error": found.error,
        "step_seconds": found.measured.step_seconds,
        "clock_error": found.measured.clock_error,
        "kinds": [{**msgspec.to_builtins(k), "apart": k.apart} for k in found.kinds],
        "suspects": msgspec.to_builtins(found.suspects),
        "machine": found.machine.name,
    }
