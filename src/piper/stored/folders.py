"""Folders: checkpoints of one run side by side. What is there under its name is whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path

from piper.errors import FileError
from piper.stored.manifest import NAME, Manifest, read_manifest

_STEP = re.compile(r"step-(\d{8,})$")
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(partial|removed|replaced)$")


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    return Path(root) / f"step-{step:08d}"


def checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """All that are there, the oldest first."""
    found = [path for path in _entries(root) if _STEP.match(path.name) and (path / NAME).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(root: str | os.PathLike[str]) -> Path | None:
    return next(reversed(checkpoints(root)), None)


def found_in(folder: str | os.PathLike[str]) -> tuple[str, Manifest]:
    """A checkpoint, or the latest of those in a folder, and its manifest."""
    path = Path(os.path.abspath(folder))
    _put_back(path)
    if not (path / NAME).is_file():
        newest = latest(path)
        if newest is None:
            raise FileError(f"{folder} has no checkpoint", legal="what run.save(folder) wrote")
        path = newest
    return str(path), read_manifest(path)


def begin(folder: str | os.PathLike[str]) -> Path:
    """A new folder beside the one that it becomes, once it is whole."""
    target = Path(folder)
    made = _beside(target, "partial")
    try:
        if target.exists() and not target.is_dir():
            raise FileError(f"{target} is a file", legal="a new or an empty folder")
        if target.exists() and not (target / NAME).is_file() and any(target.iterdir()):
            raise FileError(
                f"{target} is there, and is no checkpoint", legal="a new or an empty folder"
            )
        made.mkdir(parents=True)
    except OSError as problem:
        raise FileError(f"{target} cannot be written: {problem.strerror or problem}") from None
    return made


def commit(made: Path, folder: str | os.PathLike[str]) -> None:
    """Give a folder that is whole its name; an older one of that name goes."""
    target = Path(folder)
    sync(made)
    old = None
    if target.exists():
        old = _beside(target, "replaced")
        os.rename(target, old)
    os.rename(made, target)
    sync(target.parent)
    if old is not None:
        _discard(old)


def remove(folder: Path) -> None:
    """At once for all who look: it loses its name before its files."""
    gone = _beside(folder, "removed")
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune(root: str | os.PathLike[str], keep: int, spared: str | None = None) -> None:
    """Leave the `keep` newest, and the one that is spared. One that cannot be removed keeps no other."""
    left = ""
    for folder in checkpoints(root)[:-keep]:
        if os.path.abspath(folder) != spared:
            try:
                remove(folder)
            except OSError as problem:
                left = left or f"{folder} cannot be removed: {problem.strerror or problem}"
    if left:
        raise FileError(left)


def _put_back(target: Path) -> None:
    """Of a checkpoint that was about to be replaced when its process ended, the old one has no name."""
    if not target.exists():
        for old in _entries(target.parent):
            found = _UNFINISHED.match(old.name)
            mine = found and found[1] == target.name and found[2] == "replaced"
            if mine and (old / NAME).is_file():
                with contextlib.suppress(OSError):  # another rank does so at the same time
                    os.rename(old, target)
                return


def _discard(folder: Path) -> None:
    """First what makes it a checkpoint: a part of one must not be taken for it."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep(root: str | os.PathLike[str]) -> list[str]:
    """Remove what runs that ended in the middle have left; the names of that."""
    for path in _entries(root):
        matched = _UNFINISHED.match(path.name)
        if matched and matched[2] == "replaced":
            _put_back(path.parent / matched[1])
    found = [path for path in _entries(root) if _UNFINISHED.match(path.name)]
    for path in found:
        _discard(path)
    return sorted(path.name for path in found)


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _beside(target: Path, what: str) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.{what}"


def _entries(root: str | os.PathLike[str]) -> list[Path]:
    try:
        return list(Path(root).iterdir())
    except OSError:
        return []
