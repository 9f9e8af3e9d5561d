"""Machine files: what `piper profile` keeps of a machine, as JSON."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from piper.cost.machine import Machine
from piper.cost.presets import MACHINES, machine
from piper.errors import FileError
from piper.files import read_bytes, write_bytes

VERSION = 2
_LIMIT = 64 << 20


class _File(msgspec.Struct, frozen=True):
    version: int
    machine: Machine


def save_machine(found: Machine, path: str | os.PathLike[str]) -> None:
    write_bytes(path, msgspec.json.format(msgspec.json.encode(_File(VERSION, found))))


def load_machine(path: str | os.PathLike[str]) -> Machine:
    data = read_bytes(str(path), limit=_LIMIT, legal="what `piper profile --out` wrote")
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is no machine: {error}") from None
    if found.version != VERSION:
        raise FileError(
            f"{path} has version {found.version}", legal=f"version {VERSION}: measure again"
        )
    return found.machine


def machine_of(
    name: str | Machine, *, network: str | None = None, ranks_per_node: int | None = None
) -> Machine:
    """A preset by its name, or a file by its path; a Machine is its own."""
    if isinstance(name, Machine):
        return name
    if name.lower() not in MACHINES and (name.endswith(".json") or Path(name).exists()):
        found = load_machine(name)
        if network is not None or ranks_per_node is not None:
            raise FileError(
                f"{name} has its own links", legal=f"a machine by name: {', '.join(MACHINES)}"
            )
        return found
    return machine(name, network=network, ranks_per_node=ranks_per_node)
