"""`--device`: what the command line says of the device in, the kind that this machine has out."""

from __future__ import annotations

import argparse
from typing import Any

from piper.cli.stage_lines import remark

DEVICES = ("auto", "cpu", "cuda")


def add_device_argument(group: Any) -> None:
    group.add_argument(
        "--device", choices=DEVICES, help="default: auto: cuda if there is a GPU here, else cpu"
    )


def device_of(arguments: argparse.Namespace) -> str:
    """The kind of device that is asked for, else the one that is here."""
    named: str | None = getattr(arguments, "device", "cpu")  # a command without the option: cpu
    if named not in (None, "auto"):
        return named
    from piper.bodies.device import own_device

    return own_device()


def spoken_device(arguments: argparse.Namespace) -> str:
    """The same. What nobody asked for is said, once."""
    from piper.bodies.device import gpu_names

    device = device_of(arguments)
    if arguments.device != device and not getattr(arguments, "device_is_said", False):
        arguments.device_is_said = True
        names = gpu_names() if device == "cuda" else []
        here = f"{len(names)} x {names[0]}" if names else "there is no GPU here"
        remark(arguments, f"device {device}: {here}")
    return device
