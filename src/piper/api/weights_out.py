"""Weights out: a run in, safetensors files in a folder out; each rank writes what it holds."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from piper.errors import FileError, RunError
from piper.files import check_path
from piper.frontend.hf_weights import config_text, is_pretrained
from piper.ir.form.byte_sizes import parse_size
from piper.stored.folders import sync
from piper.stored.safetensors_index import CODES
from piper.stored.weight_files import INDEX, OURS, WeightFiles, weight_files
from piper.stored.writers import Entry, entries_by_rank

if TYPE_CHECKING:
    from piper.api.run import Run

_UNFINISHED = re.compile(r"\.[0-9a-f]{8}\.partial$")
FLOATS = tuple(name for name in CODES if "float" in name)


def save_weights(
    run: Run, folder: str | os.PathLike[str], *, dtype: str | None, shard_size: int | str
) -> Path:
    """The folder, when all files have their names in it."""
    check_path(folder, "run.save_weights")
    target = Path(os.path.abspath(folder))
    if not run.plan.train:
        raise RunError("an evaluation has no weights of its own", legal="a run that trains")
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    if wanted is not None and wanted not in FLOATS:
        raise RunError(f"dtype={dtype!r}", legal=", ".join(FLOATS))
    files = weight_files(run.plan, dtype=wanted, shard_size=parse_size(shard_size))
    entries = [
        [entry for entry in mine if entry.section == "model" and entry.tensor in files.places]
        for mine in entries_by_rank(run.plan)
    ]
    for mine in entries:
        _check_sources(run, target, mine)
    made = Path(run.agreed(lambda: str(_begin(target, files))))
    problems = [p for p in run.workers.write_weights(entries, files.places, str(made)) if p]
    run.agreed(lambda: _end(run, target, made, files, problems))
    return target


def _check_sources(run: Run, target: Path, entries: list[Entry]) -> None:
    """What no rank holds is read from its file each time: that file must stay."""
    stored = run.workers.stored.model if run.workers.stored else {}
    for entry in entries:
        name = unquote(entry.tensor)
        for piece in stored[name].pieces if entry.holding < 0 and name in stored else ():
            file = Path(piece.file)
            if OURS.match(file.name) and file.parent.resolve() == target.resolve():
                raise FileError(
                    f"{file} would be replaced, but the run still reads {name} from it",
                    legal="another folder",
                )


def _begin(target: Path, files: WeightFiles) -> Path:
    """All files at their full size with their headers, in a folder of their own."""
    made = target / f".{uuid.uuid4().hex[:8]}.partial"
    try:
        made.mkdir(parents=True)
        for old in list(target.iterdir()):  # of a process that was killed
            if _UNFINISHED.match(old.name) and old != made:
                shutil.rmtree(old, ignore_errors=True)
        for file in files.files:
            with open(made / file.name, "wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, file.size)
                stream.write(file.header)
    except OSError as problem:
        raise _failed(target, made, problem.strerror or str(problem)) from None
    return made


def _end(run: Run, target: Path, made: Path, files: WeightFiles, problems: list[str]) -> None:
    """Give the files their names, in place of those that an earlier call wrote."""
    if problems:
        shutil.rmtree(made, ignore_errors=True)
        raise FileError(problems[0], legal="a folder that all ranks can write, with enough space")
    more = {INDEX: files.index} if files.index else {}
    model = run.plans.job.model if run.plans else None
    if model is not None and is_pretrained(model):
        more["config.json"] = config_text(model, files.dtype).encode()
    try:
        for name, data in more.items():
            (made / name).write_bytes(data)
            sync(made / name)
        names = [*(file.name for file in files.files), *more]
        (target / INDEX).unlink(missing_ok=True)  # of other files than those that come
        for name in names:
            os.replace(made / name, target / name)
        for old in list(target.iterdir()):
            if OURS.match(old.name) and old.name not in names:
                old.unlink()
        made.rmdir()
        sync(target)
    except OSError as problem:
        raise _failed(target, made, problem.strerror or str(problem)) from None


def _failed(target: Path, made: Path, reason: str) -> FileError:
    shutil.rmtree(made, ignore_errors=True)
    return FileError(f"{target} cannot be written: {reason}")
