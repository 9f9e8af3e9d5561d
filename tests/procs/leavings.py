"""Leavings: what a pool has while it runs, and what of it is still there afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Seen:
    """Processes of pools while they ran, and where they listened."""

    pids: tuple[int, ...] = ()
    ports: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Leavings:
    """Of all pools that keep their folders in `home`, and zombies but for those that were `before`."""

    home: Path
    before: frozenset[int] = field(default_factory=lambda: frozenset(_zombies()))

    def processes(self) -> list[int]:
        """Processes that have the folder among their arguments, zombies too."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if any(word.startswith(bytes(self.home) + b"/") for word in words[2:]):
                    found.append(int(entry.name))
        return found

    def seen(self) -> Seen:
        """What there is now."""
        inodes, pids = set(), tuple(self.processes())
        for pid in pids:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        return Seen(pids, frozenset(a for a, inode in _listening() if inode in inodes))

    def assert_none(self, seen: Seen, *, within: float = 0.0) -> None:
        """No process, folder, port, shared memory or zombie is left after some seconds."""
        deadline = time.monotonic() + within
        while (left := self._left(seen)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}, left

    def _left(self, seen: Seen) -> dict[str, object]:
        found = {
            "processes": self.processes(),
            "folders": sorted(path.name for path in self.home.glob("piper-*")),
            "ports": sorted(seen.ports & {address for address, _ in _listening()}),
            "shared memory": [n for n in os.listdir("/dev/shm") if _of(seen.pids, n)],
            "zombies": [pid for pid in _zombies() if pid not in self.before],
        }
        return {what: left for what, left in found.items() if left}


def _of(pids: tuple[int, ...], name: str) -> bool:
    """Whether a file's name has the number of one of some processes in it."""
    return any(re.search(rf"(?<!\d){pid}(?!\d)", name) for pid in pids)


def _listening() -> set[tuple[str, str]]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(words[1], words[9]) for words in lines if words[3] == "0A"}


def _zombies() -> list[int]:
    """Children of this process that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and int(parent) == os.getpid():
                found.append(int(entry.name))
    return found
