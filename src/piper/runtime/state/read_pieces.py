"""Reading pieces: an index of stored tensors and a range in, its elements out; no more is read."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper.errors import FileError
from piper.plan.tensor_parts import Part, all_of
from piper.runtime.state.patch_views import patch_view
from piper.stored.boxes import (
    Box,
    memory_order,
    overlap,
    patches_in,
    row_major,
    runs_by,
    within,
)
from piper.stored.stored_pieces import Piece, Stored, StoredTensor

_COMPARED = 4 << 20  # elements at once


class PieceReader:
    """Reads parts of stored tensors, and counts the bytes that it took from files.

    `memory` has tensors by name, each in one run, of which pieces of that form are."""

    def __init__(self, stored: Stored, memory: Mapping[str, Tensor] | None = None) -> None:
        self.stored = stored
        self.memory = memory or {}
        self.num_bytes = 0

    def elements(self, name: str, part: Part, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of a part of a tensor, one after the other."""
        tensor = self.stored[name]
        flat = torch.empty(last - first, dtype=getattr(torch, tensor.dtype))
        patches = list(patches_in(part, first, last))
        num = 0
        for piece in tensor.pieces:
            common = [(at, found) for at in patches if (found := overlap(at.box, piece.box))]
            if not common:
                continue
            stored = _StoredPiece(self, name, tensor, piece)
            for patch, found in common:
                target = patch_view(flat, patch)[within(found, patch.box).slices]
                target.copy_(stored.box(within(found, piece.box)))
                num += found.num_elements
        if num != last - first:
            missing = last - first - num
            raise FileError(f"the files of {name} lack {missing} of {last - first} elements")
        return flat

    def tensor(self, name: str) -> Tensor:
        """All of a stored tensor."""
        shape = self.stored[name].shape
        part = all_of(shape)
        return self.elements(name, part, 0, part.num_elements).view(shape)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape have the same elements, in the dtype of the other."""
        part, dtype = all_of(self.stored[one].shape), getattr(torch, self.stored[other].dtype)
        starts = range(0, part.num_elements, _COMPARED)
        ranges = ((start, min(start + _COMPARED, part.num_elements)) for start in starts)
        return all(
            torch.equal(self.elements(one, part, *r).to(dtype), self.elements(other, part, *r))
            for r in ranges
        )

    def read(self, piece: Piece, offset: int, length: int) -> bytearray:
        """Bytes of a piece's file, which must be there, and as they were when it was indexed."""
        file, done = piece.file, 0
        try:
            number = os.open(file, os.O_RDONLY)
            try:
                about = os.fstat(number)
                if piece.seen not in (None, (about.st_size, about.st_mtime_ns)):
                    raise FileError(
                        f"{file} has changed since lower(weights=...) looked into it",
                        legal="lower again; or another file for what is written meanwhile",
                    )
                # A false length is found.
                data = bytearray(min(length, max(about.st_size - offset, 0) + 1))
                view = memoryview(data)
                while done < length:
                    num = os.preadv(number, [view[done:]], offset + done)
                    if not num:
                        raise FileError(
                            f"{file} has ended after {offset + done} bytes",
                            legal=f"a file of at least {offset + length} bytes, as its index says",
                        )
                    done += num
            finally:
                os.close(number)
        except OSError as problem:
            raise FileError(f"{file} cannot be read: {problem.strerror or problem}") from None
        self.num_bytes += length
        return data


class _StoredPiece:
    """One piece of a tensor, read as far as it is asked for."""

    def __init__(self, reader: PieceReader, name: str, tensor: StoredTensor, piece: Piece) -> None:
        self.reader = reader
        self.name = name
        self.dtype: torch.dtype = getattr(torch, tensor.dtype)
        self.piece = piece
        self._saved: Tensor | None = None

    def box(self, box: Box) -> Tensor:
        """A box of the piece, counted from its start."""
        piece, size = self.piece, self.dtype.itemsize
        if piece.form == "torch":
            return self._loaded[box.slices]
        strides = row_major(piece.box.size) if piece.strides is None else piece.strides
        if piece.form == "memory":
            begin = sum(s * stride for s, stride in zip(box.start, strides, strict=True))
            flat = self.reader.memory[piece.file].view(-1)
            return flat.as_strided(box.size, strides, piece.offset // size + begin)
        runs = [
            self.reader.read(piece, piece.offset + begin * size, num * size)
            for begin, num in runs_by(box, strides)
        ]
        data = runs[0] if len(runs) == 1 else bytearray().join(runs)
        order = memory_order(strides)
        read = torch.frombuffer(data, dtype=self.dtype).view([box.size[dim] for dim in order])
        return read.permute([order.index(dim) for dim in range(len(order))])

    @property
    def _loaded(self) -> Tensor:
        """What `torch.save` wrote, which is read once and held to its checksum."""
        if self._saved is None:
            piece = self.piece
            data = self.reader.read(piece, piece.offset, piece.length)
            if piece.crc is not None and zlib.crc32(data) != piece.crc:
                raise FileError(
                    f"{self.name}: bytes {piece.offset} to {piece.offset + piece.length} of "
                    f"{piece.file} are not those that were written",
                    legal="another checkpoint; piper checkpoint verify names all that is damaged",
                )
            self._saved = _loaded(data, self.name, piece, self.dtype)
        return self._saved


def _loaded(data: bytearray, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
    try:
        found: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever damaged bytes make torch raise
        raise FileError(f"{name} in {piece.file} cannot be read: {problem}") from None
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != piece.box.size:
        raise FileError(f"{piece.file} holds something else than {name} at byte {piece.offset}")
    return found
