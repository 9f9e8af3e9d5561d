"""Options that name a machine in, the Machine out: the one that a plan is made for and simulated on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from piper.cli.device_option import device_of

if TYPE_CHECKING:
    from piper.cost.machine import Machine


MACHINE_OPTIONS = ("machine", "network", "ranks_per_node")


def add_machine_arguments(parser: Any) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="that tasks run on: a100, h100, h200, b200, cpu, or what `piper profile --out` wrote "
        "(default: to be simulated cpu or h100, after the device; to order tasks a nominal one)",
    )
    parser.add_argument("--network", metavar="NAME", help="between nodes, such as infiniband-ndr")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: the machine's (8; cpu has 64)"
    )


def given_machine(arguments: argparse.Namespace) -> Machine | None:
    """That of the command line, if it says anything of one."""
    if not names_machine(arguments):
        return None
    return chosen_machine(arguments, device_of(arguments))


def names_machine(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, name, None) is not None for name in MACHINE_OPTIONS)


def chosen_machine(arguments: argparse.Namespace, device: str) -> Machine:
    from piper.cost.machine_file import machine_of

    name = arguments.machine or ("h100" if device == "cuda" else "cpu")
    return machine_of(name, network=arguments.network, ranks_per_node=arguments.ranks_per_node)
