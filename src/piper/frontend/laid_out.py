"""LaidOut: a tensor in files that torch's functions cut, join and turn without any element of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from piper.stored.boxes import Box, overlap, row_major, within
from piper.stored.stored_pieces import Piece, StoredTensor


class InexpressibleError(Exception):
    """What was to be done with a tensor needs its elements."""


class LaidOut:
    """Where a tensor's elements lie. Functions that only place elements give another one."""

    def __init__(self, stored: StoredTensor) -> None:
        if any(piece.form == "torch" for piece in stored.pieces):
            raise InexpressibleError("pieces that torch.save wrote")
        self.stored = stored

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.stored.dtype)
        return found

    @property
    def ndim(self) -> int:
        return len(self.stored.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LaidOut:
        return self

    def narrow(self, dim: int, start: int, length: int) -> LaidOut:
        dim %= self.ndim
        begin, size = [0] * self.ndim, list(self.stored.shape)
        begin[dim], size[dim] = start, length
        window = Box(tuple(begin), tuple(size))
        pieces = []
        for piece in self.stored.pieces:
            common = overlap(piece.box, window)
            if common is not None:
                pieces.append(_part(piece, common, within(common, window)))
        return self._made(window.size, pieces)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[LaidOut, ...]:
        num = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, num - at) for at in range(0, num, sizes)]
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        pairs = zip(starts, sizes, strict=True)
        return tuple(self.narrow(dim, start, size) for start, size in pairs)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LaidOut, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def transpose(self, dim0: int, dim1: int) -> LaidOut:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def turned(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(numbers[dim] for dim in order)

        pieces = [
            msgspec.structs.replace(
                piece,
                box=Box(turned(piece.box.start), turned(piece.box.size)),
                strides=turned(_strides(piece)),
            )
            for piece in self.stored.pieces
        ]
        return self._made(turned(self.stored.shape), pieces)

    def unsqueeze(self, dim: int) -> LaidOut:
        dim %= self.ndim + 1

        def wider(numbers: tuple[int, ...], more: int) -> tuple[int, ...]:
            return (*numbers[:dim], more, *numbers[dim:])

        pieces = [
            msgspec.structs.replace(
                piece,
                box=Box(wider(piece.box.start, 0), wider(piece.box.size, 1)),
                strides=wider(_strides(piece), 0),
            )
            for piece in self.stored.pieces
        ]
        return self._made(wider(self.stored.shape, 1), pieces)

    def _made(self, shape: tuple[int, ...], pieces: Sequence[Piece]) -> LaidOut:
        return LaidOut(StoredTensor(self.stored.dtype, shape, tuple(pieces)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            raise InexpressibleError(f"torch.{getattr(func, '__name__', func)}")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise InexpressibleError(f"Tensor.{name}")


def _cat(tensors: Sequence[LaidOut], dim: int = 0) -> LaidOut:
    first = tensors[0]
    dim %= first.ndim
    pieces, num = [], 0
    for tensor in tensors:
        sizes = zip(tensor.shape, first.shape, strict=True)
        if tensor.dtype != first.dtype:
            raise InexpressibleError(f"{tensor.dtype} beside {first.dtype}")
        if any(a != b for at, (a, b) in enumerate(sizes) if at != dim):
            raise InexpressibleError(f"{list(tensor.shape)} beside {list(first.shape)}")
        for piece in tensor.stored.pieces:
            start = piece.box.start
            moved = (*start[:dim], start[dim] + num, *start[dim + 1 :])
            pieces.append(
                msgspec.structs.replace(
                    piece, box=Box(moved, piece.box.size), strides=_strides(piece)
                )
            )
        num += tensor.shape[dim]
    shape = first.stored.shape
    return first._made((*shape[:dim], num, *shape[dim + 1 :]), pieces)


def _stack(tensors: Sequence[LaidOut], dim: int = 0) -> LaidOut:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: LaidOut.chunk,
    torch.split: LaidOut.split,
    torch.transpose: LaidOut.transpose,
    torch.unsqueeze: LaidOut.unsqueeze,
    torch.narrow: LaidOut.narrow,
}


def _part(piece: Piece, common: Box, box: Box) -> Piece:
    """What a piece has of a box of its tensor, as a piece of another one, where it is `box`."""
    strides = _strides(piece)
    width = piece.length // piece.box.num_elements
    inside = within(common, piece.box)
    begin = sum(s * stride for s, stride in zip(inside.start, strides, strict=True))
    offset, length = piece.offset + begin * width, common.num_elements * width
    return msgspec.structs.replace(piece, box=box, offset=offset, length=length, strides=strides)


def _strides(piece: Piece) -> tuple[int, ...]:
    return row_major(piece.box.size) if piece.strides is None else piece.strides
