"""NCCL ranks that share one card, kept alive for the whole run."""

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
            for other in found.values():
                other.close()  # one service for the card at a time
            found[size] = piper.LocalPool(size, device="cuda", ranks_per_gpu=size, timeout=30)
        return found[size]

    yield get
    for made in found.values():
        made.close()
