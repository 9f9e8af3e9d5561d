"""TensorType: what is known of a tensor without its numbers: shape, dtype, and a bound on its rows."""

from __future__ import annotations

import functools
import math

import msgspec

MAX_BYTES = 1 << 62  # no tensor has more
_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex128": 16, "uint64": 8,
    "uint32": 4, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4,
}  # fmt: skip


class TensorType(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shape and dtype. With `bound`, dim 0 depends on the data: `shape[0]` is the number of rows to
    expect and `bound` the most there can be."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    bound: int | None = None

    def __str__(self) -> str:
        sizes = [str(size) for size in self.shape]
        if self.bound is not None:
            sizes[0] += f"<={self.bound}"
        return f"{self.dtype}[{','.join(sizes)}]"

    @property
    def size(self) -> int:
        """The number of elements to expect."""
        return math.prod(self.shape)

    @property
    def possible(self) -> bool:
        """Whether there can be such a tensor; for types from files."""
        return _possible(self)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)

    def planned_nbytes(self, load: float) -> int:
        """With `load` times the rows to expect, where they depend on the data, or as many as can be."""
        if self.bound is None:
            return self.nbytes
        rows = min(self.bound, math.ceil(self.shape[0] * load))
        return _nbytes((rows, *self.shape[1:]), self.dtype)

    @property
    def bound_nbytes(self) -> int:
        if self.bound is None:
            return _nbytes(self.shape, self.dtype)
        return _nbytes((self.bound, *self.shape[1:]), self.dtype)


# A graph has many Values and few types.
@functools.lru_cache(maxsize=1 << 14)
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtype_bytes(dtype)


@functools.lru_cache(maxsize=1 << 14)
def _possible(type: TensorType) -> bool:
    size = math.prod(dim for dim in (*type.shape, type.bound) if dim)
    counts = type.bound is None or (bool(type.shape) and type.bound >= 0)
    return is_dtype(type.dtype) and min(type.shape, default=0) >= 0 and counts and size < MAX_BYTES


def is_dtype(name: str) -> bool:
    return name in _BYTES


def dtype_bytes(dtype: str) -> int:
    return _BYTES.get(dtype, 4)


def accumulation_dtype(dtype: str) -> str:
    """Where gradients of this dtype are summed: float64 stays, everything else is float32."""
    return "float64" if dtype == "float64" else "float32"


# The leaves of a global batch by name, each with its shape.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_text(shapes: Shapes) -> str:
    """`x [8, 24], y [8]`."""
    return ", ".join(f"{name.removeprefix('batch:')} {list(shape)}" for name, shape in shapes)
