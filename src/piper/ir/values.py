"""Values: the tensors between nodes, with their role, shape and layout per mesh axis."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from piper.mesh import Slice

Role = Literal[
    "batch",  # a leaf of the batch, given by the loader on each rank that reads it
    "key",  # keys of a chunk's random operations, in one microbatch
    "param",
    "buffer",
    "activation",
    "saved",  # kept by a forward chunk for its backward
    "grad",  # gradient of an activation
    "param_grad",
    "loss",
    "count",
    "sum",  # several nodes add into it; readers wait for all of them
    "gradient",  # a bucket's gradient, or the rank's part of it: a sum that stays
    "flat",  # all parameters of a bucket
    "shard",  # the rank's part of a bucket
    "gathered",  # a bucket for as long as it is used
    "updated",  # new content of something that stays
    "splits",  # host integers: rows to and from each peer
    "wire",  # between a send and its recv
    "constant",
]

Layout = Literal["replicated", "split(0)", "partial", "routed"]

_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex128": 16, "uint64": 8,
    "uint32": 4, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor, on all ranks of a slice.

    `of` names what a gradient or a sum belongs to: an activation or a parameter; of a traced key, the
    user's first random operation. With `bound`, dim 0 depends on the data: `shape[0]` is what to expect
    and `bound` the most it can be. With `place` it takes the place of that Value; with `base` it is a
    part of that one, from element `offset` on.
    """

    name: str
    role: Role
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    layout: tuple[tuple[str, Layout], ...] = ()
    of: str = ""
    bound: int | None = None
    slice: Slice | None = None
    place: str = ""
    base: str = ""
    offset: int = 0
    bucket: int = -1
    uses: int = 0
    ahead: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    @property
    def bound_nbytes(self) -> int:
        if self.bound is None:
            return self.nbytes
        return self.bound * math.prod(self.shape[1:]) * dtype_bytes(self.dtype)


def dtype_bytes(dtype: str) -> int:
    return _BYTES.get(dtype, 4)


def accumulation_dtype(dtype: str) -> str:
    """Where gradients of this dtype are summed: float64 stays, everything else is float32."""
    return "float64" if dtype == "float64" else "float32"


def layout_under(role: Role, owner: Literal["replicate", "shard"]) -> Layout:
    """How a Value of this role lies along an axis that replicate or shard owns."""
    if owner == "replicate":
        if role in ("param", "buffer"):
            return "replicated"
        return "partial" if role == "param_grad" else "split(0)"
    return "split(0)" if role in ("param", "param_grad") else "routed"
