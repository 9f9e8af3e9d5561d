"""Slots: the places for tensors on a rank, and all that is true of each kind of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from piper.ir.layouts import Layouts
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True)
class SlotKind:
    """One kind of slot.

    Of the fields that a slot may leave out, only those in `has` say something of this kind. What `stays`
    lives from step to step; what is `filled` is there before a step's first task; what `lingers` is
    there from its first write to the step's end. The model's own tensors are `model`, and what belongs
    to a bucket is `bucketed`. Slots that one task writes and others read within a step may be `pooled`:
    they may take turns in one buffer.
    """

    name: str
    has: tuple[str, ...] = ()
    stays: bool = False
    filled: bool = False
    lingers: bool = False
    model: bool = False
    bucketed: bool = False
    pooled: bool = False


_ROWS = (
    SlotKind("param", ("source", "base", "offset", "cut"), stays=True, filled=True, model=True),
    SlotKind("buffer", ("source", "cut"), stays=True, filled=True, model=True),
    SlotKind("flat", ("bucket",), stays=True, filled=True, model=True, bucketed=True),
    SlotKind("shard", ("bucket", "base"), stays=True, filled=True, model=True, bucketed=True),
    SlotKind("grad", ("bucket", "base"), stays=True, bucketed=True),
    SlotKind("unreduced", ("bucket",), lingers=True, bucketed=True),
    SlotKind("constant", ("source", "cut"), stays=True, filled=True),
    SlotKind("coordinate", ("source", "cut"), stays=True, filled=True),
    SlotKind("batch", ("source", "microbatch", "cut"), filled=True),
    SlotKind("key", ("source", "microbatch", "cut"), filled=True),
    SlotKind("gathered", ("bucket",), bucketed=True),
    SlotKind("temp", ("source", "bound", "bucket", "pool", "cut"), pooled=True),
    SlotKind("sum", ("bound", "bucket", "pool", "cut"), pooled=True),
    SlotKind("host"),
)
SLOT_KINDS: dict[str, SlotKind] = {row.name: row for row in _ROWS}
STAYING = frozenset(row.name for row in _ROWS if row.stays)
FILLED = frozenset(row.name for row in _ROWS if row.filled)
LINGERING = frozenset(row.name for row in _ROWS if row.lingers)
MODEL = frozenset(row.name for row in _ROWS if row.model)
BUCKETED = frozenset(row.name for row in _ROWS if row.bucketed)
POOLED = frozenset(row.name for row in _ROWS if row.pooled)
PASSING = POOLED | LINGERING | {"gathered"}  # made within a step, on the device
COORDINATE = TensorType((1,), "int64")
SUMS = ("sum", "unreduced")  # what the first task that adds to it makes
PARTS = ("shard", "grad")  # what has only the rank's part of a bucket, if that is cut


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place for one tensor on each rank of a class.

    `param` and `buffer` hold the model's tensor `source`, or the rank's box of it. `flat` holds all
    parameters of a bucket, `shard` the rank's part of one along the bucket's axes, `gathered` a bucket
    for as long as it is used; `grad` sums the gradients of a bucket, whole or the rank's part, and
    stays. `unreduced` is a whole sum in which the rank's part is reduced in its place: a `grad` shows
    that part, and a copy of it stays until the next step. `sum` is added into within a step; `batch`
    is leaf `source` of the rank's microbatch; `key` has the keys of the random operations `source`
    ("0-2,5") in it; `constant` holds the number `source`, `coordinate` the
    rank's place along the axis `source`; the rest are written and freed within a step.
    A gradient of one parameter names that as its `source`.

    With `base` the slot is no memory of its own: it shows slot `base` from element `offset` on, or,
    for a shard or a grad, the rank's part of it. Slots of one `pool` take turns in one buffer, which the
    rank keeps from step to step. Along axes that share tensors `cut` says how what lies in it lies.
    """

    name: str
    kind: str
    type: TensorType
    source: str = ""
    microbatch: int = 0
    base: int = -1
    offset: int = 0
    bucket: int = -1
    pool: int = -1
    cut: Layouts = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def bound(self) -> int | None:
        return self.type.bound
