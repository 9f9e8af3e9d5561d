"""Damaged checkpoints and weights: one Piper error for each, or the tensors that the file holds.

A checkpoint has checksums: it gives what was saved, or nothing. Weights in other formats have none; they
give what the format's own library reads, but for torch's metadata, which it would unpickle.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.api.run import Run
from piper.cli.main import main
from piper.strategies import parallel
from tests.file_verdicts import Failed, accepted, ended
from tests.procs import tiny

LOST = 0.05  # how often the file is gone
SIGNED = 0.5  # how often a damaged manifest has the checksum of what it says
Tensors = dict[str, Tensor]


def try_checkpoint(path: Path, rng: Random, original: str) -> bool:
    folder, signed = _damaged(path, rng, original)
    out = str(folder.with_name("converted.safetensors"))
    accepted(ended(lambda: main(["checkpoint", "show", str(folder)])))
    verify = ended(lambda: main(["checkpoint", "verify", str(folder)]))
    whole = accepted(verify, legal=(0, 1)) and verify.code == 0
    converted = accepted(ended(lambda: main(["checkpoint", "convert", str(folder), out])))
    if converted and not signed:
        masters = {name: t for name, t in good()[1].items() if name in good()[2]}
        _compare(load_file(out), masters, "converted")

    def go_on() -> int:
        with _job().resume(folder, "loopback") as run:
            if not signed:
                _compare(_state(run), good()[1], "resumed")
        return 0

    resumed = accepted(ended(go_on))
    if resumed and not whole:
        raise Failed(f"it is resumed, but not whole: {verify.output}")
    return resumed


def try_weights(path: Path, rng: Random, original: str) -> bool:
    folder, signed = _damaged(path, rng, original)
    kind = original.partition("/")[0]

    def start() -> int:
        with _program().lower(weights=folder).launch("single") as run:
            found = run.masters()
        wanted = as_others_read(folder, kind)
        if wanted is not None and not signed:
            _compare(found, wanted, "read")
        return 0

    return accepted(ended(start))


@cache
def _program() -> Program:
    return piper.trace(tiny.model, tiny.batch(), tiny.step)


@cache
def _job() -> Job:
    optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.5)
    return _program().apply(parallel(dp=2, zero=1)).lower(optimizer=optimizer)


def _state(run: Run) -> Tensors:
    kept = run.optimizer_state().items()
    state = {f"{name}:{key}": t for name, states in kept for key, t in states.items()}
    return {**run.masters(), **state, "steps": torch.tensor(run.steps)}


@cache
def good() -> tuple[dict[str, dict[str, bytes]], Tensors, Tensors]:
    """The files of a checkpoint and of weights in other forms, the state that was saved, the weights."""
    with tempfile.TemporaryDirectory() as name, _job().launch("loopback") as run:
        root = Path(name)
        for number in range(2):
            run.step(tiny.batch(number))
        run.save(root / "saved")
        run.save_weights(root / "shards", shard_size=100)
        (root / "torch").mkdir()
        torch.save(run.state_dict(), root / "torch" / "pytorch_model.bin")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process alone
            dcp.save({"model": run.state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
        files = {
            folder.name: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
            for folder in root.iterdir()
        }
        return files, _state(run), run.state_dict()


def _damaged(path: Path, rng: Random, original: str) -> tuple[Path, bool]:
    """A folder like the good one, but for the file that was damaged; whether it was signed anew."""
    folder, _, name = original.partition("/")
    made = path.with_name("folder")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for other, data in good()[0][folder].items():
        (made / other).write_bytes(data)
    data, signed = path.read_bytes(), name == "piper.json" and rng.random() < SIGNED
    if signed:
        body = data.partition(b"\n")[2].removesuffix(b"\n")
        data = b'{"crc": %d}\n' % zlib.crc32(body) + body + b"\n"
    (made / name).write_bytes(data)
    if rng.random() < LOST:
        (made / name).unlink()
    return made, signed


def _compare(found: Tensors, wanted: Tensors, how: str) -> None:
    """Bit for bit, in the dtype that was found."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            raise Failed(f"{how}: {name} is on one side only")
        pair = found[name], wanted[name].to(found[name].dtype)
        if pair[0].shape != pair[1].shape or len({t.numpy().tobytes() for t in pair}) > 1:
            raise Failed(f"{how}: {name} is {pair[0]}, not {pair[1]}")


def as_others_read(folder: Path, kind: str) -> Tensors | None:
    """The tensors that the format's own library reads, or, of a checkpoint, those that were saved; None
    where it refuses."""
    readers: dict[str, Callable[[], Any]] = {
        "saved": lambda: good()[2],
        "torch": lambda: torch.load(folder / "pytorch_model.bin", weights_only=True),
        "shards": lambda: dict(_shards(folder)),
        "dcp": lambda: _distributed(folder),
    }
    try:
        found: Tensors | None = readers[kind]()
        return found
    except Exception:
        return None


def _distributed(folder: Path) -> Tensors | None:
    if (folder / ".metadata").read_bytes() != good()[0]["dcp"][".metadata"]:
        return None
    found = {name: torch.empty_like(tensor) for name, tensor in good()[2].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        dcp.load({"model": found}, checkpoint_id=folder, no_dist=True)
    return found


def _shards(folder: Path) -> Iterator[tuple[str, Tensor]]:
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_bytes())
    for name, file in index["weight_map"].items():
        yield name, load_file(folder / file)[name]
