"""peak: one party's slots and tasks in; the most bytes that are alive at once, by category, out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.check.parties import Party, World
from piper.ir.tensor_type import accumulation_dtype, dtype_bytes
from piper.plan.group_runs import runs_within
from piper.plan.optimizers import SCALAR_BYTES, state_size
from piper.plan.slots import FILLED, STAYING, Slot
from piper.plan.tasks import Calling, Settle, Update
from piper.plan.types import Bucket, ParamGroup, Plan

CATEGORIES = ("parameters", "gradients", "optimizer", "saved", "gathered", "buffers", "inside")


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank when most are alive: by category, at which task, and the largest slots; and
    what stays from step to step, by category. `inside` is what the task's body makes for itself."""

    label: str
    num_ranks: int
    total: int
    by_category: dict[str, int]
    task: int
    largest: tuple[tuple[int, int], ...]  # (bytes, slot)
    kept: dict[str, int]


def peak_of(world: World, party: Party) -> Peak:
    """In dispatch order, at the bounds of what depends on the data."""
    ledger = _Ledger(world, party)
    most, at, kept = ledger.total, -1, ledger.by_category()
    for index in range(len(party.tasks)):
        ledger.start(index)
        if ledger.total > most:
            most, at = ledger.total, index
        ledger.end(index)
    ledger = _Ledger(world, party)  # again, up to the peak, to see what is alive there
    for index in range(at + 1):
        ledger.start(index)
        if index < at:
            ledger.end(index)
    return Peak(
        label=party.label,
        num_ranks=party.num_ranks,
        total=most,
        by_category=ledger.by_category(),
        task=at,
        largest=tuple(ledger.largest()[:5]),
        kept=kept,
    )


class _Ledger:
    """What is alive on a rank of a party while its tasks pass."""

    def __init__(self, world: World, party: Party) -> None:
        self.party = party
        self.root, self.use = world.local(party).root, world.local(party).use
        self.size = [slot_bytes(s) if s.base < 0 else 0 for s in party.slots]
        self.alive = [s.kind in STAYING | FILLED for s in party.slots]
        self._make_buffers()
        self.inside = 0  # of the task under way
        self.bodies = world.plan.inside
        self.optimizer = 0
        self.late: dict[int, int] = {}  # bucket -> bytes that a late update keeps for a while
        for task in party.tasks:
            if isinstance(task, Update):
                state = _State(world.plan, task, party.slots)
                self.optimizer += state.kept
                if task.late:
                    self.late[task.bucket] = state.before
        self.total = self.optimizer + sum(
            b for b, a in zip(self.size, self.alive, strict=True) if a
        )

    def _make_buffers(self) -> None:
        """A buffer is there all the time and counts once, as the first of its slots."""
        made: set[int] = set()
        for index, slot in enumerate(self.party.slots):
            if slot.pool >= 0:
                self.alive[index] = True
                if slot.pool in made:
                    self.size[index] = 0
                made.add(slot.pool)

    def start(self, index: int) -> None:
        task = self.party.tasks[index]
        for slot in task.writes:
            root = self.root[slot]
            if not self.alive[root]:
                self.alive[root] = True
                self.total += self.size[root]
        if isinstance(task, Calling):
            self.inside = self.bodies.get(task.body, 0)
            self.total += self.inside
        if isinstance(task, Update) and task.late:
            self._keep(self.late[task.bucket])

    def end(self, index: int) -> None:
        task = self.party.tasks[index]
        self.total -= self.inside
        self.inside = 0
        for slot in task.frees:
            if self.alive[slot] and self.party.slots[slot].pool < 0:
                self.alive[slot] = False
                self.total -= self.size[slot]
        if isinstance(task, Settle):
            self._keep(-self.late.get(task.bucket, 0))

    def _keep(self, size: int) -> None:
        self.optimizer += size
        self.total += size

    def by_category(self) -> dict[str, int]:
        found = dict.fromkeys(CATEGORIES, 0)
        found["optimizer"], found["inside"] = self.optimizer, self.inside
        for size, slot in self.largest():
            found[self.use[slot]] += size
        return found

    def largest(self) -> list[tuple[int, int]]:
        """(bytes, slot) of all that is alive, largest first."""
        found = [(self.size[i], i) for i, alive in enumerate(self.alive) if alive and self.size[i]]
        return sorted(found, reverse=True)


def slot_bytes(slot: Slot) -> int:
    if slot.kind == "host":
        return 0
    return slot.type.bound_nbytes


class _State:
    """Bytes beside the slots that an Update steps: averages and masters of narrow parameters are `kept`
    from step to step; a late one needs all as it was `before`, until it is settled."""

    def __init__(self, plan: Plan, task: Update, known: Sequence[Slot]) -> None:
        bucket = plan.buckets[task.bucket]
        slots = [known[s] for s in task.stepped[: len(bucket.params)]]
        wide = accumulation_dtype(bucket.dtype)
        masters = sum(math.prod(slot.shape) for slot in slots) * dtype_bytes(wide)
        averages = max(
            sum(_averages(plan.param_groups[g], shape, dtype_bytes(wide)) for g, shape in pieces)
            for pieces in _pieces(plan, bucket, slots)
        )
        self.kept = averages + (masters if wide != bucket.dtype else 0)
        self.kept += masters if plan.ema is not None else 0
        self.before = averages + masters


def _pieces(
    plan: Plan, bucket: Bucket, slots: Sequence[Slot]
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """What is stepped by itself, with its parameter group: whole parameters; or, for each of the ranks
    that a bucket is cut for, the runs of its part."""
    if not bucket.over:
        yield [(bucket.group_of(i), slot.shape) for i, slot in enumerate(slots)]
        return
    parts = plan.mesh.size_of(bucket.over)
    for part in range(parts if len(set(bucket.param_groups)) > 1 else 1):
        window = part * bucket.size // parts, (part + 1) * bucket.size // parts
        yield [(run.group, (run.end - run.begin,)) for run in runs_within(bucket, *window)]


def _averages(group: ParamGroup, shape: tuple[int, ...], element: int) -> int:
    elements, numbers = state_size(group, shape)
    return elements * element + numbers * SCALAR_BYTES
