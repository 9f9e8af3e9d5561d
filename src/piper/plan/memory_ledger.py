"""MemoryLedger: a class's slots and tasks in; the bytes that are alive while its tasks pass, out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from piper.directives.shard import Shard
from piper.ir.tensor_type import dtype_bytes
from piper.plan.body_moments import Moments, peak_moment
from piper.plan.group_runs import runs_within
from piper.plan.local_order import Local
from piper.plan.optimizers import SCALAR_BYTES, state_size
from piper.plan.slots import FILLED, LINGERING, STAYING, Slot
from piper.plan.summed_inside import summed_inside
from piper.plan.tasks import Calling, Settle, Stepping, Task, Update
from piper.plan.types import Bucket, ParamGroup, Plan

CATEGORIES = ("parameters", "gradients", "optimizer", "saved", "gathered", "buffers", "inside")


class MemoryLedger:
    """What is alive on a rank, by category, at the load that `shard` plans for. A task's writes
    are alive from its start, its frees until its end; `inside` is what bodies under way make for
    themselves. A body under way stands at the moment at which it has most alive: its later results are
    not made, and what it is handed and reads no more is gone."""

    def __init__(self, plan: Plan, local: Local) -> None:
        self.tasks, self.slots = local.tasks, local.slots
        self.root, self.use = local.root, local.use
        self.bodies = plan.inside
        self.handed = local.handed
        self.peaks: dict[tuple[object, ...], _AtPeak] = {}
        load = planned_load(plan)
        self.size = [_slot_bytes(slot, load) if slot.base < 0 else 0 for slot in self.slots]
        for slot in summed_inside(local, plan.products, plan.device):
            self.size[slot] = 0  # the body that would fill it adds to the sum instead
        self.alive = [slot.kind in STAYING | FILLED for slot in self.slots]
        self._make_buffers()
        self.late: dict[int, int] = {}  # bucket -> bytes that a late update keeps for a while
        self.casts: dict[int, int] = {}  # bucket -> bytes that a step makes of it in wider dtypes
        self.under_way: dict[int, int] = {}  # task that calls a body -> bytes of its own
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        # Between steps, of what lingers in one: the rank's parts.
        self.left = sum(
            slot.type.nbytes
            for slot in self.slots
            if slot.base >= 0 and self.slots[slot.base].kind in LINGERING
        )
        for task in self.tasks:
            if isinstance(task, Update):
                state = _State(plan, task, self.slots)
                self._add("optimizer", state.kept)
                self.casts[task.bucket] = state.casts
                if task.late:
                    self.late[task.bucket] = state.before
        for size, alive, use in zip(self.size, self.alive, self.use, strict=True):
            if alive:
                self._add(use, size)

    def _make_buffers(self) -> None:
        """A buffer is there all the time and counts once, as the first of its slots."""
        made: set[int] = set()
        for index, slot in enumerate(self.slots):
            if slot.pool >= 0:
                self.alive[index] = True
                if slot.pool in made:
                    self.size[index] = 0
                made.add(slot.pool)

    def start(self, index: int) -> None:
        task = self.tasks[index]
        peak = self._peak(task)
        if peak is None:
            for slot in task.writes:
                self._make(slot)
        else:
            for place in peak.made:
                self._make(task.writes[place])
            for place in peak.dropped:
                self._drop(task.reads[place])
            self._add("inside", peak.own)
            self.under_way[index] = peak.own
        self._add("optimizer", self._cast(task))
        if isinstance(task, Update) and task.late:
            self._add("optimizer", self.late[task.bucket])

    def end(self, index: int) -> None:
        task = self.tasks[index]
        self._add("inside", -self.under_way.pop(index, 0))
        self._add("optimizer", -self._cast(task))
        for slot in task.writes:
            self._make(slot)
        for slot in task.frees:
            self._drop(slot)
        if isinstance(task, Settle):
            self._add("optimizer", -self.late.get(task.bucket, 0))

    def _make(self, slot: int) -> None:
        root = self.root[slot]
        if not self.alive[root]:
            self.alive[root] = True
            self._add(self.use[root], self.size[root])

    def _drop(self, slot: int) -> None:
        if self.alive[slot] and self.slots[slot].pool < 0:
            self.alive[slot] = False
            self._add(self.use[slot], -self.size[slot])

    def _peak(self, task: Task) -> _AtPeak | None:
        """Of a task that calls a body; equal calls have an equal one."""
        if not isinstance(task, Calling) or not (moments := self.bodies.get(task.body)):
            return None
        size, handed, alive = self.size, self.handed, self.alive
        frees = handed.intersection(task.frees)
        freed = tuple([size[slot] if slot in frees else 0 for slot in task.reads])
        roots = [self.root[slot] for slot in task.writes]
        filled = tuple([0 if alive[root] else size[root] for root in roots])
        key = (task.body, freed, filled)
        if key not in self.peaks:
            self.peaks[key] = _AtPeak(moments, freed, filled)
        return self.peaks[key]

    def _cast(self, task: Task) -> int:
        return self.casts.get(task.bucket, 0) if isinstance(task, Stepping) else 0

    def _add(self, category: str, nbytes: int) -> None:
        self.held[category] += nbytes
        self.total += nbytes

    def largest(self) -> list[tuple[int, int]]:
        """(bytes, slot) of all that is alive, largest first."""
        found = [(self.size[i], i) for i, alive in enumerate(self.alive) if alive and self.size[i]]
        return sorted(found, reverse=True)


class _AtPeak:
    """A body when it has most alive: the results that it has `made`, the arguments `dropped` by then."""

    def __init__(self, moments: Moments, freed: Sequence[int], filled: Sequence[int]) -> None:
        peak = peak_moment(moments, freed, filled)
        later = {place for moment in moments[peak + 1 :] for place in moment.makes}
        before = [place for moment in moments[:peak] for place in moment.drops]
        self.own = moments[peak].own
        self.made = [place for place in range(len(filled)) if place not in later]
        self.dropped = [place for place in before if freed[place]]


def planned_load(plan: Plan) -> float:
    """How many times an even share of rows a rank may get before it takes more than is planned."""
    found = (record.directive for record in plan.history)
    return max((shard.max_load for shard in found if isinstance(shard, Shard)), default=1.0)


def _slot_bytes(slot: Slot, load: float) -> int:
    if slot.kind == "host":
        return 0
    return slot.type.planned_nbytes(load)


class _State:
    """Bytes beside the slots that an Update steps: averages and masters of narrow parameters are `kept`
    from step to step; a late one needs all as it was `before`, until it is settled. A step `casts`
    gradients and state to the masters' dtype."""

    def __init__(self, plan: Plan, task: Update, known: Sequence[Slot]) -> None:
        bucket = plan.buckets[task.bucket]
        slots = [known[s] for s in task.stepped[: len(bucket.params)]]
        masters = sum(math.prod(slot.shape) for slot in slots) * dtype_bytes(bucket.master)
        averages = _largest(plan, bucket, slots, bucket.state)
        self.kept = averages + (masters if bucket.master != bucket.dtype else 0)
        self.kept += masters if plan.ema is not None else 0
        self.before = averages + masters
        self.casts = masters if bucket.sums != bucket.master else 0
        if bucket.state != bucket.master:
            self.casts += _largest(plan, bucket, slots, bucket.master)


def _largest(plan: Plan, bucket: Bucket, slots: Sequence[Slot], dtype: str) -> int:
    """Bytes of an optimizer's averages in a dtype, on the rank that has most."""
    element = dtype_bytes(dtype)
    return max(
        sum(_averages(plan.param_groups[g], shape, element) for g, shape in pieces)
        for pieces in _pieces(plan, bucket, slots)
    )


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
