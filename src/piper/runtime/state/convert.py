"""Convert: a saved run into one file, for whoever has no use for its pieces."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from piper.errors import FileError
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.safetensors_index import CODES
from piper.stored.stored_pieces import Stored, StoredState
from piper.stored.weight_files import FileTensor, header_of, widest_first


def convert(state: StoredState, path: str | os.PathLike[str]) -> int:
    """The weights as safetensors, or all state by `torch.save` (then all of it is in memory at once);
    how many tensors. A file of that name is replaced by a whole one."""
    target = Path(path)
    if target.suffix == ".safetensors":
        return _as_safetensors(state.model, target)
    if target.suffix not in (".pt", ".pth"):
        raise FileError(f"{target} has no known ending", legal="FILE.safetensors, FILE.pt")
    model = _read(state.model)
    optimizer = {name: _read(kept) for name, kept in state.optimizer.items()}
    averages = _read(state.averages)
    whole: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": state.steps}
    if averages:
        whole["ema"] = averages
    _write(target, lambda file: torch.save(whole, file))
    return len(model) + len(averages) + sum(map(len, optimizer.values()))


def _as_safetensors(stored: Stored, target: Path) -> int:
    tensors = [FileTensor(name, name, one.dtype, one.shape) for name, one in stored.items()]
    for each in tensors:
        if each.dtype not in CODES:
            raise FileError(
                f"{each.name} is {each.dtype}, which safetensors do not have", legal="FILE.pt"
            )
    tensors = widest_first(tensors)
    header, _ = header_of(tensors, {})
    reader = PieceReader(stored)

    def write(file: IO[bytes]) -> None:
        file.write(header)
        for each in tensors:
            file.write(reader.tensor(each.name).reshape(-1).view(torch.uint8).numpy().data)

    _write(target, write)
    return len(tensors)


def _write(target: Path, write: Callable[[IO[bytes]], None]) -> None:
    made = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(made, "wb") as file:
            write(file)
        os.replace(made, target)
    except (OSError, RuntimeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        raise FileError(f"{target} cannot be written: {reason or problem}") from None
    finally:
        with contextlib.suppress(OSError):
            made.unlink()


def _read(stored: Stored) -> dict[str, Tensor]:
    reader = PieceReader(stored)
    return {name: reader.tensor(name) for name in stored}
