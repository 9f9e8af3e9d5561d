"""Values: the tensors between nodes, with their role, type and layout per mesh axis."""

from __future__ import annotations

from typing import Literal

import msgspec

from piper.errors import PlanError
from piper.ir.layouts import REPLICATED, SHARED, Layout, Layouts, Routed, Split, in_dims_of
from piper.ir.tensor_type import TensorType
from piper.mesh import Slice

# Roles of what no node of a step makes.
GIVEN = ("param", "buffer", "batch", "key", "constant", "coordinate")
RESULTS = ("loss", "count", "metric")  # roles of what a step returns
SUMMED = ("sum", "unreduced")  # roles of what nodes of a step add into
# What the ranks of an axis have their parts of.
Shares = Literal["batch", "experts", "tensors"]

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
    "prediction",  # rows that an evaluation gives to the user, by the name `of`
    "metric",  # (sum, count) of what is only reported, by the name `of`
    "sum",  # several nodes add into it; readers wait for all of them
    "gradient",  # a bucket's gradient, or the rank's part of it: a sum that stays
    "unreduced",  # a bucket's whole sum, in which the rank's part takes its own place once reduced
    "flat",  # all parameters of a bucket
    "shard",  # the rank's part of a bucket
    "gathered",  # a bucket for as long as it is used
    "updated",  # new content of something that stays
    "statistic",  # what a forward leaves for buffers that change
    "splits",  # host integers: rows to and from each peer
    "wire",  # between a send and its recv
    "constant",
    "coordinate",  # the rank's own along the axis `of`, for code that differs between ranks
]


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor, on all ranks of a slice.

    Of a logical Value `type` is that of one microbatch, whole over the mesh; of a physical one, what one
    rank has. `layout` says per axis how it lies where it is made, `batch` how it lies along whatever
    shares the batch: data ranks and microbatches.

    `of` names what a gradient or a sum belongs to: an activation or a parameter; of a traced key, the
    user's first random operation. With `place` it takes the place of that Value; with `base` it is a
    part of that one, from element `offset` on.

    Along axes that share tensors `cut` says how the code has it: what is made lies so, and is read so.
    A reader that needs another layout reads a Value whose `source` is the one that was made.
    """

    name: str
    role: Role
    type: TensorType = TensorType()
    layout: Layouts = ()
    batch: Layout = REPLICATED
    of: str = ""
    slice: Slice | None = None
    place: str = ""
    base: str = ""
    offset: int = 0
    bucket: int = -1
    cut: Layouts = ()
    source: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def nbytes(self) -> int:
        return self.type.nbytes


def made_for(made: Value, read: Value) -> Layouts:
    """How a Value lies, in the dims of what is made of it."""
    return in_dims_of(read.layout, made.layout, len(read.shape) - len(made.shape))


def plain_layout(value: Value) -> Layouts:
    """How a Value lies between chunks: along axes as the batch does, or as its code has it."""
    if value.role in ("param", "param_grad"):
        return value.layout
    cut = dict(value.cut)
    return tuple((axis, cut.get(axis, value.batch)) for axis, _ in value.layout)


def made_along(value: Value, axis: str, shares: Shares, counts: str) -> Layout:
    """How a Value lies along an axis whose ranks share the batch, experts or tensors, in the code that
    makes it or is given it; `counts` are those of the experts' rows."""
    if shares == "tensors":
        return dict(value.cut).get(axis, REPLICATED)
    if shares == "batch" or value.role in ("batch", "buffer", "key", "constant", "coordinate"):
        return value.batch
    if value.role == "statistic":
        raise PlanError(f"{value.name}: experts that are sharded change no buffers")
    return Split(0) if value.role in ("param", "param_grad") else Routed(counts)


def read_along(value: Value, axis: str, shares: Shares, counts: str) -> Layout:
    """How code that shares the batch, experts or tensors along an axis reads a Value."""
    if shares == "tensors":
        return made_along(value, axis, shares, counts)
    if shares == "batch":
        return SHARED if value.role in ("param", "buffer") else value.batch
    return Split(0) if value.role == "param" else Routed(counts)
