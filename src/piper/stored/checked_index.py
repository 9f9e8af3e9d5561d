"""A checked index: stored tensors as a file says in, refused unless they are those of a plan."""

from __future__ import annotations

from urllib.parse import unquote

from piper.errors import PlanError
from piper.ir.tensor_type import MAX_BYTES, TensorType
from piper.plan.types import Plan
from piper.stored.boxes import Box
from piper.stored.stored_pieces import Piece, Stored


def check_index(stored: Stored, plan: Plan) -> None:
    """Names and shapes are the plan's, and pieces lie inside of their tensors."""
    shapes = {unquote(name): tensor.shape for name, tensor in plan.tensors.items()}
    for name, tensor in stored.items():
        if shapes.get(name) != tensor.shape:
            raise PlanError(f"the job starts from weights that are not its own: {name}")
        if not TensorType(tensor.shape, tensor.dtype).possible:
            raise PlanError(f"{name} is stored as {tensor.dtype}, which no tensor is")
        for piece in tensor.pieces:
            if not is_possible(piece, tensor.shape):
                raise PlanError(f"{name} is stored in a piece that it cannot have: {piece}")


def is_possible(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can have it."""
    strides = (0,) * len(shape) if piece.strides is None else piece.strides
    numbers = (piece.offset, piece.length, *strides)
    return (
        piece.form != "memory"
        and len(strides) == len(shape)
        and all(0 <= number < MAX_BYTES for number in numbers)
        and _lies_in(piece.box, shape)
    )


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.size) == len(shape):
        return False
    dims = zip(box.start, box.size, shape, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= num for start, size, num in dims)
