"""Class columns: a class of a plan in; what its tasks touch and wait for, out. Pages explain by them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.ir.form.byte_sizes import show_size
from piper.plan.local_order import Local
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.report.explain import group_text, slice_text
from piper.plan.report.summary import slot_bytes
from piper.plan.slots import PASSING, Slot
from piper.plan.tasks import Add, Comm, Meeting, Run, Task
from piper.plan.types import Plan, RankClass
from piper.view.columns import Columns, Ragged, Ref

# What `explain` has to know of a task, a bit each.
BLOCKS, ADDS, SUMS, OF_A_STEP, PACED = 1, 2, 4, 8, 16


class SlotColumns(msgspec.Struct, frozen=True):
    """A row per slot; `bound` are its bytes at most, `planned` those that count as memory."""

    name: Ref
    about: Ref
    use: Ref
    bound: Ref
    planned: Ref
    base: Ref
    pool: Ref
    passing: Ref


class ClassColumns(msgspec.Struct, frozen=True):
    """`group` is the text of who meets, by its number, and `key` what the ends of a message share; both
    are 0, the empty text, where there is none."""

    slice: str
    about: str
    num: int
    name: Ref
    kind: Ref
    stream: Ref
    phase: Ref
    origin: Ref
    facts: Ref
    leaves: Ref
    group: Ref
    key: Ref
    reads: Ragged
    writes: Ragged
    frees: Ragged
    waits: Ragged
    overlaps: Ragged
    slots: SlotColumns


def class_columns(columns: Columns, plan: Plan, found: RankClass, local: Local) -> ClassColumns:
    tasks = found.tasks
    return ClassColumns(
        slice=str(found.slice),
        about=slice_text(plan, found),
        num=len(tasks),
        name=columns.texts(task.name for task in tasks),
        kind=columns.texts(task.kind for task in tasks),
        stream=columns.texts(plan.streams[task.stream].name for task in tasks),
        phase=columns.texts(task.phase if isinstance(task, Run) else "" for task in tasks),
        origin=columns.column("i", (task.origin for task in tasks)),
        facts=columns.counts([_facts(task) for task in tasks]),
        leaves=columns.counts([task.leaves if isinstance(task, Run) else 0 for task in tasks]),
        group=columns.texts(_groups(plan, found)),
        key=columns.texts(task.key if isinstance(task, Comm) else "" for task in tasks),
        reads=columns.ragged(task.reads for task in tasks),
        writes=columns.ragged(task.writes for task in tasks),
        frees=columns.ragged(task.frees for task in tasks),
        waits=columns.ragged(task.waits for task in tasks),
        overlaps=columns.ragged(found.overlaps),
        slots=_slots(columns, plan, local),
    )


def _facts(task: Task) -> int:
    found = BLOCKS * task.blocks + ADDS * isinstance(task, Add)
    if isinstance(task, Comm):
        facts = task.facts
        found += SUMS * facts.sums + OF_A_STEP * facts.of_a_step + PACED * facts.paced
    return found


def _groups(plan: Plan, found: RankClass) -> Iterator[str]:
    known: dict[tuple[int, str], str] = {}
    for task in found.tasks:
        if not isinstance(task, Meeting):
            yield ""
            continue
        key = task.group, task.kind
        if key not in known:
            known[key] = group_text(plan, found, task)
        yield known[key]


def _slots(columns: Columns, plan: Plan, local: Local) -> SlotColumns:
    slots = local.slots
    return SlotColumns(
        name=columns.texts(slot.name for slot in slots),
        about=columns.texts(map(_about, slots)),
        use=columns.texts(local.use),
        bound=columns.counts([slot_bytes(slot) for slot in slots]),
        planned=columns.counts(MemoryLedger(plan, local).size),
        base=columns.column("i", (slot.base for slot in slots)),
        pool=columns.column("i", (slot.pool for slot in slots)),
        passing=columns.counts([int(slot.kind in PASSING) for slot in slots]),
    )


def _about(slot: Slot) -> str:
    """`temp float32[8,16]  512 B`."""
    shape = ",".join(map(str, slot.shape))
    bound = f" (at most {slot.bound} rows)" if slot.bound is not None else ""
    return f"{slot.kind} {slot.dtype}[{shape}]{bound}  {show_size(slot_bytes(slot))}"
