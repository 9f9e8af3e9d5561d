"""Tasks: what a rank can be asked to do, one type a kind, each with its slots by name.

The runtime's whole vocabulary. `task_kind` adds a kind; how a Worker runs it stands in
`runtime/worker/handlers.py`, how it comes from a node in `passes/dispatch/emit.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard, TypeVar

import msgspec

from piper.errors import PlanError
from piper.ir.communication import CommunicationKind, communication
from piper.ir.layouts import Layouts
from piper.ir.nodes import TRACED, Tags

NO_SLOT = -1


class Task(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="task"
):
    """One step of a rank: on `stream`, after the tasks in `waits`, and then `frees` slots.

    `tags` are those of the node that it comes from, `origin` the directive that made it. `READS` and
    `WRITES` name the fields that hold slots; one that holds NO_SLOT is left out.
    """

    name: str
    stream: int
    tags: Tags = ()
    waits: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    origin: int = TRACED

    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ()
    blocks: ClassVar[bool] = False  # whether the host dispatches nothing before it is complete

    @property
    def kind(self) -> str:
        """What it does, in a word: the tag that JSON has."""
        return str(type(self).__struct_config__.tag)

    @property
    def reads(self) -> tuple[int, ...]:
        return _slots(self, self.READS)

    @property
    def writes(self) -> tuple[int, ...]:
        return _slots(self, self.WRITES)


def _slots(task: Task, fields: tuple[str, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for field in fields:
        value = getattr(task, field)
        if isinstance(value, tuple):
            found += value
        elif value != NO_SLOT:
            found.append(value)
    return tuple(found)


TASKS: dict[str, type[Task]] = {}  # every kind of task that a plan may have
T = TypeVar("T", bound=type[Task])


def task_kind(kind: T) -> T:
    """Let plans have this kind of task."""
    name = kind.__struct_config__.tag
    assert isinstance(name, str)
    if name in TASKS:
        raise PlanError(f"there is already a task kind {name!r}")
    if kind.kind is Task.kind:
        kind.kind = name  # type: ignore[method-assign, assignment]
    TASKS[name] = kind
    return kind


def all_tasks() -> Any:
    """The union of all kinds, for decoding."""
    return functools.reduce(operator.or_, TASKS.values())


class Meeting(Task, frozen=True, kw_only=True, omit_defaults=True, tag="meeting"):
    """A task that knows a group of ranks."""

    group: int


class Calling(Task, frozen=True, kw_only=True, omit_defaults=True, tag="calling"):
    """A task that calls a body."""

    body: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    READS = ("inputs",)
    WRITES = ("outputs",)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[int, ...]:
        return self.outputs


@task_kind
class Run(Calling, frozen=True, kw_only=True, omit_defaults=True, tag="run"):
    """Call a body, in a phase of a chunk. Its products leave `leaves` multiprocessors of a device to the
    communication that is expected beside it. Where axes share tensors it was traced for inputs that lie
    as `sees` says, and for results that lie as `makes` says; nothing is said of what one phase keeps for
    another."""

    phase: str = ""
    leaves: int = 0
    sees: tuple[Layouts, ...] = ()
    makes: tuple[Layouts, ...] = ()


@task_kind
class Fold(Calling, frozen=True, kw_only=True, omit_defaults=True, tag="fold"):
    """Give buffers, the first inputs and all outputs, their next content by what forwards left for
    them, the inputs that follow."""


@task_kind
class Add(Task, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """Add each of `terms` into the sum of the same position, or all into one sum, of a bucket.

    `first[i]` says that term i starts its sum instead of adding to it, `offsets[i]` where it lies in a
    bucket's sum, and `zeros` that what no term covers starts as zeros.
    """

    terms: tuple[int, ...] = ()
    sums: tuple[int, ...]
    first: tuple[bool, ...] = ()
    offsets: tuple[int, ...] = ()
    zeros: bool = False

    READS = ("terms",)
    WRITES = ("sums",)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.terms

    @property
    def writes(self) -> tuple[int, ...]:
        return self.sums

    @property
    def parts(self) -> list[tuple[int, int, bool]]:
        """Per term: its sum, where in it, and whether it starts that part."""
        one = len(self.sums) != len(self.terms)
        return [
            (self.sums[0 if one else i], self.offsets[i] if self.offsets else 0, first)
            for i, first in enumerate(self.first)
        ]


@task_kind
class Read(Meeting, frozen=True, kw_only=True, omit_defaults=True, tag="read"):
    """The host reads how many rows it has for each rank of a group, and how many each has for it."""

    sent: int
    received: int
    splits: int

    READS = ("sent", "received")
    WRITES = ("splits",)
    blocks = True


@task_kind
class Norm(Task, frozen=True, kw_only=True, omit_defaults=True, tag="norm"):
    """The sum of a gradient's squares, times `weight`."""

    gradient: int
    squares: int
    weight: float

    READS = ("gradient",)
    WRITES = ("squares",)


@task_kind
class Update(Task, frozen=True, kw_only=True, omit_defaults=True, tag="update"):
    """Step a bucket's parameters, or the rank's shard of them, by its gradient, divided in place.

    The divisor is the number `count` or what the slot `counted` holds. With `clip`, `norm` is the sum of
    all squared gradients. A `late` update keeps what it overwrites until `Settle` has seen the norm.
    """

    bucket: int
    gradient: int
    stepped: tuple[int, ...]
    count: float | None = None
    counted: int = NO_SLOT
    clip: float | None = None
    norm: int = NO_SLOT
    late: bool = False

    READS = ("gradient", "counted", "norm")
    WRITES = ("stepped", "gradient")


@task_kind
class Settle(Task, frozen=True, kw_only=True, omit_defaults=True, tag="settle"):
    """Make a late Update again if the norm asks for smaller gradients; forget what it had kept."""

    bucket: int
    gradient: int
    stepped: tuple[int, ...]
    clip: float
    norm: int
    count: float | None = None
    counted: int = NO_SLOT

    READS = ("stepped", "gradient", "counted", "norm")
    WRITES = ("stepped", "gradient")


@task_kind
class Comm(Meeting, frozen=True, kw_only=True, omit_defaults=True, tag="comm"):
    """One rank's end of a communication. Tasks of several classes that have one `key` meet; ranks of
    one class meet in the same task, which needs none.

    It takes `source` and fills `target`. With `splits` the host says how many rows go where, the other
    way round if it is `reverse`; a shift goes to the rank before, then.
    """

    comm: str
    key: str = ""
    source: int = NO_SLOT
    target: int = NO_SLOT
    splits: int = NO_SLOT
    reverse: bool = False

    READS = ("source", "splits")
    WRITES = ("target",)

    @property
    def meeting(self) -> str:
        """What all members call it."""
        return self.key or self.name

    @property
    def kind(self) -> str:
        return self.comm

    @property
    def reads(self) -> tuple[int, ...]:
        if self.splits == NO_SLOT:
            return () if self.source == NO_SLOT else (self.source,)
        return (self.splits,) if self.source == NO_SLOT else (self.source, self.splits)

    @property
    def writes(self) -> tuple[int, ...]:
        return () if self.target == NO_SLOT else (self.target,)

    @property
    def facts(self) -> CommunicationKind:
        """What is true of all communication of this kind."""
        return communication(self.comm)


Stepping = Update | Settle  # the kinds that change parameters


def microbatch_of(task: Task, split_tags: Sequence[str]) -> tuple[int, ...]:
    """Which microbatch of its data rank a task works on, by the tags that splits have given."""
    values = dict(task.tags)
    return tuple(values.get(tag, 0) for tag in split_tags)


def sends(task: Task) -> TypeGuard[Comm]:
    """Whether a task keeps what it reads until another rank has it."""
    return isinstance(task, Comm) and task.facts.sends


def reduces(task: Task | None) -> TypeGuard[Comm]:
    """Whether a task leaves, on every rank of its group, the sum of what all bring."""
    return isinstance(task, Comm) and task.facts.reduces


def scatters(task: Task | None) -> TypeGuard[Comm]:
    """Whether a task leaves each rank its part of the sum."""
    return isinstance(task, Comm) and task.facts.scatters


def gathers(task: Task | None) -> TypeGuard[Comm]:
    """Whether a task leaves, on every rank, the parts of all."""
    return isinstance(task, Comm) and task.facts.gathers
