"""Pools of worker processes, kept alive for the whole run."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import piper
from tests.procs.leavings import Leavings

GetPool = Callable[[int], piper.LocalPool]


@pytest.fixture(scope="session")
def pool() -> Iterator[GetPool]:
    """The pool of a size; a new one only if a test has ended the old one."""
    found: dict[int, piper.LocalPool] = {}

    def get(size: int) -> piper.LocalPool:
        if size not in found or not found[size].alive:
            found[size] = piper.LocalPool(size)
        return found[size]

    yield get
    for made in found.values():
        made.close()


@pytest.fixture
def leavings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leavings:
    """Pools of this test, and of scripts that it starts, keep their folders in one of its own."""
    home = tmp_path / "pools"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.setenv("TMPDIR", str(home))
    return Leavings(home)
