"""What train and profile have in common: options of a launcher in, its arguments out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from piper.errors import FileError

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
        choices=tuple(launchers),
        default="local",
        help="a process per rank here (default), torchrun, Ray, or all ranks in this process",
    )
    group.add_argument(
        "--ranks-per-gpu", type=int, metavar="K", help="ranks that share each GPU, by MPS"
    )
    group.add_argument("--compile", action="store_true", default=None, help="Inductor bodies")
    group.add_argument(
        "--timeout", type=float, metavar="S", help="seconds without progress that end the run"
    )
    group.add_argument(
        "--address",
        help="Ray: HOST:PORT of a cluster, or local (default: one that runs, else a new one here)",
    )
    group.add_argument("--near", metavar="AXIS", help="Ray: ranks along it on one machine")
    group.add_argument("--spread", metavar="AXIS", help="Ray: ranks along it on many machines")


def launch_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the launcher is given; an option that it does not take is refused."""
    every = {name for taken in LAUNCHERS.values() for name in taken}
    given = {name: getattr(arguments, name) for name in sorted(every)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in LAUNCHERS[arguments.launch]:
            legal = [launcher for launcher, taken in LAUNCHERS.items() if name in taken]
            raise FileError(
                f"--{name.replace('_', '-')} does not go with --launch {arguments.launch}",
                legal=f"--launch {' or '.join(legal)}",
            )
    return given
