"""What train and profile have in common: options of a launcher in, its arguments out."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from piper.errors import OptionError

LAUNCHERS = {  # which options of the command line each launcher takes
    "local": ("timeout", "ranks_per_gpu", "compile"),
    "torchrun": ("timeout", "compile"),
    "ray": ("timeout", "compile", "near", "spread", "address"),
    "loopback": (),
    "single": ("compile",),
}


def add_launch_arguments(group: Any, launchers: Sequence[str]) -> None:
    group.add_argument(
        "--launch",
        choices=("auto", *launchers),
        default="auto",
        help="local: a process per rank here; torchrun; ray; loopback: all ranks in this process; "
        "single: one rank in this process (default: auto: torchrun in what it runs, else local)",
    )
    group.add_argument(
        "--ranks-per-gpu",
        type=int,
        metavar="K",
        help="ranks that share each GPU, by MPS (default: 1)",
    )
    group.add_argument(
        "--compile", action="store_true", default=None, help="Inductor bodies (default: eager)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds without progress that end the run (default: 120)",
    )
    group.add_argument(
        "--address",
        help="Ray: HOST:PORT of a cluster, or local (default: one that runs, else a new one here)",
    )
    group.add_argument("--near", metavar="AXIS", help="Ray: ranks along it on one machine")
    group.add_argument("--spread", metavar="AXIS", help="Ray: ranks along it on many machines")


def settle_launch(arguments: argparse.Namespace, launchers: Collection[str]) -> None:
    """Put the launcher that `auto` means in its place."""
    from piper.runtime.launch.torchrun_environment import under_torchrun

    if arguments.launch == "auto":
        arguments.launch = "torchrun" if "torchrun" in launchers and under_torchrun() else "local"


def launch_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the launcher is given; an option that it does not take is refused."""
    every = {name for taken in LAUNCHERS.values() for name in taken}
    given = {name: getattr(arguments, name) for name in sorted(every)}
    given = {name: value for name, value in given.items() if value is not None}
    if not given.get("timeout", 1) > 0:
        raise OptionError(f"--timeout {given['timeout']:g}", legal="seconds above 0")
    for name in given:
        if name not in LAUNCHERS[arguments.launch]:
            legal = [launcher for launcher, taken in LAUNCHERS.items() if name in taken]
            raise OptionError(
                f"--{name.replace('_', '-')} does not go with --launch {arguments.launch}",
                legal=f"--launch {' or '.join(legal)}",
            )
    return given
