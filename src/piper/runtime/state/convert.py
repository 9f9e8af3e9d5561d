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


def convert(state: StoredState, path: str | os.PathLike[str]) -> int:
    """All state by `torch.save`; how many tensors. All of them are in memory at once."""
    kind = Path(path).suffix
    model = _read(state.model)
    if kind not in (".pt", ".pth"):
        raise FileError(f"{os.fspath(path)} has no known ending", legal="FILE.pt")
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


def _read(stored: Stored) -> dict[str, Tensor]:
    reader = PieceReader(stored)
    return {name: reader.tensor(name) for name in stored}
