"""Plan and Task: per class of ranks one dispatch order, in the runtime's whole vocabulary."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Stream
from piper.ir.history import Record
from piper.ir.serial import decode_versioned
from piper.mesh import Group, Mesh, Slice

VERSION = 1

TaskKind = Literal["run", "send", "recv", "all_reduce", "all_to_all", "read", "add", "update"]
SlotKind = Literal["param", "buffer", "grad", "sum", "constant", "batch", "temp", "host"]


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place for one tensor on each rank of a class.

    `param` and `buffer` hold the model's tensor `source`, of which a rank has its part of dim 0 along
    `split_over`; `grad` sums that parameter's gradient and stays; `sum` is added into within a step;
    `batch` is leaf `source` of the rank's microbatch; `constant` holds the number `source`; the rest are
    written and freed within a step.
    """

    name: str
    kind: SlotKind
    shape: tuple[int, ...]
    dtype: str
    source: str = ""
    microbatch: int = 0
    split_over: tuple[str, ...] = ()
    bound: int | None = None


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a rank: on `stream`, after the tasks in `waits`, and then `frees` slots.

    `first[i]` says that `add` starts the sum `writes[i]` instead of adding to it.
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
    count: float | None = None
    origin: int = -1


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


class BatchLeaf(msgspec.Struct, frozen=True):
    """One tensor of the global batch."""

    shape: tuple[int, ...]
    dtype: str


class Optimizer(msgspec.Struct, frozen=True):
    """A `torch.optim` class by name, and its arguments."""

    name: str
    options: dict[str, Any] = {}


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that the ranks of a mesh do in one training step."""

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
    history: tuple[Record, ...] = ()
    version: int = VERSION

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.size_of(self.data_axes)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def content_hash(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()[:16]


def plan_from_json(data: bytes) -> Plan:
    return decode_versioned(data, Plan, version=VERSION)


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
        """Which part of a tensor's dim 0 this rank has, and of how many."""
        return mesh.position(self.coordinates, slot.split_over), mesh.size_of(slot.split_over)


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
