"""Plan and Task: per class of ranks one dispatch order, in the runtime's whole vocabulary."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from piper.directives.registry import read_directive
from piper.errors import PlanError
from piper.ir.graph import Stream
from piper.ir.history import Record
from piper.ir.serial import decode_versioned
from piper.mesh import Group, Mesh, Slice

VERSION = 3

TaskKind = Literal[
    "run", "send", "recv", "all_reduce", "all_to_all", "reduce_scatter", "all_gather",
    "read", "add", "norm", "update", "settle",
]  # fmt: skip
SlotKind = Literal[
    "param",
    "flat",
    "shard",
    "gathered",
    "buffer",
    "grad",
    "sum",
    "constant",
    "batch",
    "key",
    "temp",
    "host",
]
Memory = Literal["parameters", "gradients", "saved", "gathered", "buffers"]
PERSISTENT = ("param", "flat", "shard", "buffer", "constant", "grad")  # live from step to step


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place for one tensor on each rank of a class.

    `param` and `buffer` hold the model's tensor `source`, of which a rank has its part of dim 0
    along `split_over`. `flat` holds all parameters of a bucket, `shard` the rank's part of one along
    the bucket's axes, `gathered` a bucket for as long as it is used; `grad` sums the gradients of a
    bucket, whole or the rank's part, and stays. `sum` is added into within a step; `batch` is leaf
    `source` of the rank's microbatch; `key` has the keys of the random operations `source` ("0-2,5") in
    it; `constant` holds the number `source`; the rest are written and freed within a step.

    With `base` the slot is no memory of its own: it shows slot `base` from element `offset` on, or,
    for a shard, the rank's part of it. `memory` says what its bytes count as. `uses` is how many
    microbatches in a row may share a gathered bucket, and `ahead` how many chunks before the first
    it may start. Slots of one `pool` take turns in one buffer, which the rank keeps from step to step.
    """

    name: str
    kind: SlotKind
    shape: tuple[int, ...]
    dtype: str
    source: str = ""
    microbatch: int = 0
    split_over: tuple[str, ...] = ()
    bound: int | None = None
    base: int = -1
    offset: int = 0
    bucket: int = -1
    memory: Memory = "buffers"
    uses: int = 0
    ahead: int = 0
    pool: int = -1


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a rank: on `stream`, after the tasks in `waits`, and then `frees` slots.

    `add`: `first[i]` says that read i starts its sum instead of adding to it; `offsets[i]` where it
    lies in a bucket's sum; `zeros` that what no read covers starts as zeros. `update` steps a bucket's
    parameters (its writes but the last) by its gradient (the last), divided by `count` or by the slot
    read after it; with `clip` the last read is the sum of all squared gradients. `norm` sums squares,
    read i times `weights[i]`. A `late` update keeps what it overwrote until `settle` has seen the norm.
    """

    kind: TaskKind
    name: str
    stream: int
    waits: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    body: str = ""
    group: int = -1
    key: str = ""
    reverse: bool = False
    first: tuple[bool, ...] = ()
    offsets: tuple[int, ...] = ()
    zeros: bool = False
    bucket: int = -1
    count: float | None = None
    clip: float | None = None
    late: bool = False
    weights: tuple[float, ...] = ()
    phase: str = ""
    origin: int = -1


class Bucket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters that are reduced, updated and gathered together, laid out in one flat tensor.

    `offsets` are in elements; `size` is padded to a multiple of the number of ranks along `over`, the
    axes along which it is cut into shards. It lives on `slices`; along `copies` each rank has the same.
    One that is not `trained` is only gathered.
    """

    name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    dtype: str
    zero: int
    slices: tuple[Slice, ...]
    over: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    split_over: tuple[str, ...] = ()
    trained: bool = True


class RankClass(msgspec.Struct, frozen=True, omit_defaults=True):
    """All ranks of one slice: the same slots and tasks, each on its own data.

    `overlaps` has, for each group of an `order` with several members, its tasks as they are dispatched.
    """

    slice: Slice
    slots: tuple[Slot, ...]
    tasks: tuple[Task, ...]
    results: dict[str, int]
    overlaps: tuple[tuple[int, ...], ...] = ()


class ModelTensor(msgspec.Struct, frozen=True):
    """A parameter or buffer of the whole model, and the body that makes its initial value.

    The body takes a seed per random operation; each comes from the plan's seed and a key.
    """

    shape: tuple[int, ...]
    dtype: str
    init: str
    keys: tuple[str, ...]
    trainable: bool = True  # whether a gradient of the loss reaches it


class BatchLeaf(msgspec.Struct, frozen=True):
    """One tensor of the global batch."""

    shape: tuple[int, ...]
    dtype: str


class Optimizer(msgspec.Struct, frozen=True):
    """A `torch.optim` class by name, and its arguments."""

    name: str
    options: dict[str, Any] = {}


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that the ranks of a mesh do in one training step.

    Without `train` it is an evaluation: forwards only, on parameters that a training plan holds in
    slots of the same names.
    """

    mesh: Mesh
    streams: tuple[Stream, ...]
    groups: tuple[Group, ...]
    classes: tuple[RankClass, ...]
    tensors: dict[str, ModelTensor]
    batch: dict[str, BatchLeaf]
    batch_constants: dict[str, str]  # parts of the batch that are no tensors, printed
    data_axes: tuple[str, ...]
    num_microbatches: int
    optimizer: Optimizer
    seed: int
    device: str
    bodies: tuple[str, ...]
    buckets: tuple[Bucket, ...] = ()
    clip: float | None = None
    history: tuple[Record, ...] = ()
    train: bool = True
    flops: float = 0.0  # of the model's own matrix products in a step, forward and backward
    version: int = VERSION

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.size_of(self.data_axes)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def content_hash(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()[:16]


def plan_from_json(data: bytes) -> Plan:
    return decode_versioned(data, Plan, version=VERSION, hook=read_directive)


class RankPlan(msgspec.Struct, frozen=True):
    """A class bound to one rank: its groups as ranks, its share of the batch and of the experts."""

    rank: int
    data_rank: int
    coordinates: dict[str, int]
    tasks: tuple[Task, ...]
    slots: tuple[Slot, ...]
    results: dict[str, int]
    groups: dict[int, tuple[int, ...]]

    def part_of(self, slot: Slot, mesh: Mesh) -> tuple[int, int]:
        """Which part of a slot's tensor, cut along dim 0, this rank has, and of how many."""
        return self.part_along(slot.split_over, mesh)

    def part_along(self, axes: tuple[str, ...], mesh: Mesh) -> tuple[int, int]:
        return mesh.position(self.coordinates, axes), mesh.size_of(axes)


def bind(plan: Plan, rank: int) -> RankPlan:
    """What one rank does."""
    at = plan.mesh.coordinates(rank)
    for found in plan.classes:
        if all(at[axis] == index for axis, index in found.slice.fixed):
            used = {task.group for task in found.tasks if task.group >= 0}
            return RankPlan(
                rank=rank,
                data_rank=plan.mesh.position(at, plan.data_axes),
                coordinates=at,
                tasks=found.tasks,
                slots=found.slots,
                results=found.results,
                groups={g: plan.groups[g].ranks(plan.mesh, rank) for g in sorted(used)},
            )
    raise PlanError(f"rank {rank} has no tasks in this plan")
