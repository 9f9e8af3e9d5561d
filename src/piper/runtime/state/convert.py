"""Convert: a saved run into one file, for whoever has no use for its pieces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.errors import FileError
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.stored_pieces import Stored, StoredState
from piper.stored.weight_files import FileTensor, header_of


def convert(state: StoredState, path: str | os.PathLike[str]) -> int:
    """The weights as safetensors, or all state by `torch.save` (then all of it is in memory at once);
    how many tensors."""
    kind = Path(path).suffix
    if kind == ".safetensors":
        return _as_safetensors(state.model, path)
    if kind not in (".pt", ".pth"):
        raise FileError(f"{os.fspath(path)} has no known ending", legal="FILE.safetensors, FILE.pt")
    model = _read(state.model)
    optimizer = {name: _read(kept) for name, kept in state.optimizer.items()}
    averages = _read(state.averages)
    whole: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": state.steps}
    if averages:
        whole["ema"] = averages
    try:
        torch.save(whole, path)
    except (OSError, RuntimeError) as problem:
        raise FileError(f"{os.fspath(path)} cannot be written: {problem}") from None
    return len(model) + len(averages) + sum(map(len, optimizer.values()))


def _as_safetensors(stored: Stored, path: str | os.PathLike[str]) -> int:
    tensors = [FileTensor(name, name, one.dtype, one.shape) for name, one in stored.items()]
    header, _ = header_of(tensors, {})
    reader = PieceReader(stored)
    try:
        with open(path, "wb") as file:
            file.write(header)
            for each in tensors:
                file.write(reader.tensor(each.name).reshape(-1).view(torch.uint8).numpy().data)
    except OSError as problem:
        reason = problem.strerror or problem
        raise FileError(f"{os.fspath(path)} cannot be written: {reason}") from None
    return len(tensors)


def _read(stored: Stored) -> dict[str, Tensor]:
    reader = PieceReader(stored)
    return {name: reader.tensor(name) for name in stored}
