"""The cache folder: compiled bodies on disk, and locks so that one process of many compiles each."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def home() -> Path:
    """`$PIPER_CACHE`, else `~/.cache/piper`."""
    return Path(os.environ.get("PIPER_CACHE") or Path.home() / ".cache" / "piper")


@contextlib.contextmanager
def cache_folder() -> Iterator[None]:
    """Inductor's files go to our folder meanwhile, unless the user has given it another."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if before is not None and before != default_cache_dir():  # torch itself sets the default
        yield
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home() / "inductor")
    try:
        yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def lock(name: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of this name; gives whether it is held, which without `wait` it may not be.

    It ends with its process, whatever ends that.
    """
    folder = home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
