"""What simulate, profile and explain have in common: options that name a machine in, the Machine out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper.cost.machine import Machine


def add_machine_arguments(parser: Any) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="a100, h100, h200, b200, cpu, or what `piper profile --out` wrote (default: the plan's "
        "device: cpu or h100)",
    )
    parser.add_argument("--network", metavar="NAME", help="between nodes, such as infiniband-ndr")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: 8")


def chosen_machine(arguments: argparse.Namespace, device: str) -> Machine:
    from piper.cost.machine_file import machine_of

    name = arguments.machine or ("h100" if device == "cuda" else "cpu")
    return machine_of(name, network=arguments.network, ranks_per_node=arguments.ranks_per_node)
