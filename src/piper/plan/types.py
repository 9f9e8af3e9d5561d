"""Plan: per class of ranks one dispatch order of Tasks, with the slots that they use."""

from __future__ import annotations

import hashlib
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from piper.directives.registry import read_directive
from piper.errors import PlanError
from piper.ir.form.card import text_card
from piper.ir.form.screen import on_a_screen
from piper.ir.form.serial import decode_versioned
from piper.ir.graph import Stream
from piper.ir.history import Record
from piper.ir.layouts import Split
from piper.ir.precisions import Dtypes, Precision
from piper.ir.tensor_type import Shapes, TensorType
from piper.mesh import Group, Mesh, Slice
from piper.plan.body_moments import Moments
from piper.plan.cadence import Cadence
from piper.plan.slots import Slot
from piper.plan.tasks import Meeting, Task, all_tasks

VERSION = 13
TaskT = TypeVar("TaskT", bound=Task, default=Task)  # the union of all kinds, while JSON is decoded


class Bucket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters that are reduced, updated and gathered together, laid out in one flat tensor.

    `offsets` are in elements; `size` is padded to a multiple of the number of ranks along `over`, the
    axes along which it is cut into shards. It lives on `slices`; along `copies` each rank has the same,
    and along `same` it computes the same gradient, too.
    One that is not `trained` is only gathered. `param_groups` has the parameter group of each, in
    order, or nothing where all are in the first.

    Parameters are `dtype`; what the optimizer steps is `master`, what it keeps `state`. Gradients are
    added up in `sums` and reduced in `wire`.
    """

    name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    dtype: str
    master: str
    sums: str
    wire: str
    state: str
    slices: tuple[Slice, ...]
    over: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    trained: bool = True
    param_groups: tuple[int, ...] = ()

    def group_of(self, place: int) -> int:
        """The parameter group of one of its parameters."""
        return self.param_groups[place] if self.param_groups else 0

    @property
    def dtypes(self) -> Dtypes:
        return Dtypes(self.master, self.sums, self.wire, self.state)


class RankClass(msgspec.Struct, Generic[TaskT], frozen=True, omit_defaults=True):
    """All ranks of one slice: the same slots and tasks, each on its own data.

    `overlaps` has, for each group of an `order` with several members, its tasks as they are dispatched.
    """

    slice: Slice
    slots: tuple[Slot, ...]
    tasks: tuple[TaskT, ...]
    results: dict[str, int]
    overlaps: tuple[tuple[int, ...], ...] = ()


class ModelTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter or buffer of the whole model, and the body that makes its initial value.

    The body takes a seed per random operation; each comes from the plan's seed and a key. The axes in
    `cut` cut it one after the other, each in its way: see `plan/tensor_parts.py`.
    """

    type: TensorType
    init: str
    keys: tuple[str, ...]
    trainable: bool = True  # whether a gradient of the loss reaches it
    cut: tuple[tuple[str, Split], ...] = ()
    buffer: bool = False
    changes: bool = False  # whether every microbatch gives it another content

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype


class ParamGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters that are stepped alike: a `torch.optim` class by name, and its arguments.

    `number` says which optimizer it belongs to, where the user made several; `label` is the user's own
    name for it.
    """

    optimizer: str
    options: dict[str, Any] = {}
    number: int = 0
    label: str = ""

    def names(self, place: int) -> tuple[str, ...]:
        """What a precision may call the group at this place."""
        return (self.label, str(place)) if self.label else (str(place),)


class Plan(msgspec.Struct, Generic[TaskT], frozen=True):
    """All that the ranks of a mesh do in one training step.

    Without `train` it is an evaluation: forwards only, on parameters that a training plan holds in
    slots of the same names.
    """

    mesh: Mesh
    streams: tuple[Stream, ...]
    groups: tuple[Group, ...]
    classes: tuple[RankClass[TaskT], ...]
    tensors: dict[str, ModelTensor]
    batch: dict[str, TensorType]  # leaves of the global batch
    batch_constants: dict[str, str]  # parts of the batch that are no tensors, printed
    data_axes: tuple[str, ...]
    num_microbatches: int
    param_groups: tuple[ParamGroup, ...]
    seed: int
    device: str
    bodies: tuple[str, ...]
    buckets: tuple[Bucket, ...] = ()
    clip: float | None = None
    ema: float | None = None  # how much of the parameters' moving averages a step keeps
    precision: Precision = Precision()
    history: tuple[Record, ...] = ()
    cadences: tuple[Cadence, ...] = ()  # what its directives left open
    train: bool = True
    flops: float = 0.0  # of the model's own matrix products in a step, forward and backward
    body_flops: dict[str, float] = {}  # body -> operations of its matrix products, where it has any
    inside: dict[str, Moments] = {}  # body -> how its memory passes, where that is not all at once
    products: dict[str, tuple[int, ...]] = {}  # body -> results that are products, where it has any
    state_names: dict[str, str] = {}  # of the model's state_dict -> the tensor
    gathered: tuple[str, ...] = ()  # operators that read whole what is cut over an axis, and why
    version: int = VERSION

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.size_of(self.data_axes)

    @property
    def batch_shapes(self) -> Shapes:
        """Of the leaves of a global batch."""
        return tuple((name, leaf.shape) for name, leaf in self.batch.items())

    def __repr__(self) -> str:
        """A summary, as far as it fits a screen."""
        from piper.plan.report.summary import summarize  # which reads plans

        lines = ["Plan", *summarize(self).splitlines()]
        return on_a_screen(lines, more="piper.plan.report.plan_text.plan_to_text(plan)")

    def _repr_html_(self) -> str:
        """For notebooks: the same as a card."""
        return text_card(repr(self))

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def content_hash(self) -> str:
        return hash_of(self.to_json())


def hash_of(plan_json: bytes) -> str:
    return hashlib.sha256(plan_json).hexdigest()[:16]


def plan_from_json(data: bytes) -> Plan:
    kind: Any = Plan
    kind = kind[all_tasks()]
    found: Plan = decode_versioned(data, kind, version=VERSION, hook=read_directive)
    return found


class RankPlan(msgspec.Struct, frozen=True):
    """A class bound to one rank: its groups as ranks, its share of the batch and of the experts."""

    rank: int
    data_rank: int
    coordinates: dict[str, int]
    tasks: tuple[Task, ...]
    slots: tuple[Slot, ...]
    results: dict[str, int]
    groups: dict[int, tuple[int, ...]]

    def part_along(self, axes: tuple[str, ...], mesh: Mesh) -> tuple[int, int]:
        """Which part of what is cut along some axes this rank has, and of how many."""
        return mesh.position(self.coordinates, axes), mesh.size_of(axes)


def class_of(plan: Plan, rank: int) -> RankClass:
    """The class that a rank belongs to."""
    at = plan.mesh.coordinates(rank)
    for found in plan.classes:
        if all(at[axis] == index for axis, index in found.slice.fixed):
            return found
    raise PlanError(f"rank {rank} has no tasks in this plan")


def bind(plan: Plan, rank: int) -> RankPlan:
    """What one rank does."""
    at, found = plan.mesh.coordinates(rank), class_of(plan, rank)
    used = {task.group for task in found.tasks if isinstance(task, Meeting)}
    return RankPlan(
        rank=rank,
        data_rank=plan.mesh.position(at, plan.data_axes),
        coordinates=at,
        tasks=found.tasks,
        slots=found.slots,
        results=found.results,
        groups={g: plan.groups[g].ranks(plan.mesh, rank) for g in sorted(used)},
    )
