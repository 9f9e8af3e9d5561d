"""Pools of worker processes, kept alive for the whole run."""

from collections.abc import Callable, Iterator

import pytest

import piper

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
