"""Pieces: the index of tensors in files. It is data: a process that has it reads what it needs."""

from __future__ import annotations

from typing import Literal

import msgspec

from piper.stored.boxes import Box

# Plain elements; the bytes of `torch.save`, which can only be read as a whole; or plain elements of a
# tensor in memory, whose name `file` is.
Form = Literal["raw", "torch", "memory"]


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A box of a tensor in a file, from byte `offset` on; `crc` is the CRC-32 of its bytes, if known.

    Plain elements lie one row after the other, or so many apart along each dim as `strides` says.
    Without a checksum, `seen` has the file's size and time of change as they were when it was indexed.
    """

    box: Box
    file: str
    offset: int
    length: int
    form: Form = "raw"
    crc: int | None = None
    strides: tuple[int, ...] | None = None
    seen: tuple[int, int] | None = None


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor whose elements lie in pieces that do not overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


Stored = dict[str, StoredTensor]  # by name


class StoredState(msgspec.Struct, frozen=True):
    """What a run starts from: the model's tensors by their own names; of a run that was saved also the
    moving averages, what optimizers keep (by parameter, then by torch's names) and the steps done."""

    model: Stored
    averages: Stored = {}
    optimizer: dict[str, Stored] = {}
    steps: int = 0
    evaluations: int = 0
