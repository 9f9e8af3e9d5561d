"""Holdings: a plan and a rank in; which elements of which of the model's tensors lie where on it, out.

A rank has a part of each tensor, as axes cut it. What lies in a flat shard of a bucket may begin or end
in the middle of that; so a holding is a part and a range of its elements, as they lie in the rank's own
tensor, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import msgspec

from piper.plan.optimizers import StateForm, state_pieces
from piper.plan.slots import PARTS, Slot
from piper.plan.tasks import Update
from piper.plan.tensor_parts import Part, part_of
from piper.plan.types import Bucket, ParamGroup, Plan, RankPlan, bind

What = Literal["param", "buffer", "grad", "master", "average", "state"]


class Holding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Elements `first` to `last` of a part of a tensor lie in a slot from element `offset` on.

    Masters, moving averages and optimizer state lie beside the slot that they step, element for element;
    `form` says so of a piece of state, or that it is one number, or has a shape of its own.
    """

    what: What
    tensor: str
    slot: int
    offset: int
    part: Part
    first: int
    last: int
    state: str = ""
    form: StateForm = "elements"

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the part."""
        return (self.first, self.last) == (0, self.part.num_elements)

    @property
    def key(self) -> str:
        """What a rank calls it: `layer.weight`, or `layer.weight[0:128]` for a range."""
        name = f"{self.tensor}:{self.state}" if self.state else self.tensor
        return name if self.is_whole else f"{name}[{self.first}:{self.last}]"


def holdings(plan: Plan, rank: int) -> tuple[Holding, ...]:
    """All that a rank holds from step to step, each memory once."""
    return tuple(_Held(plan, bind(plan, rank)).all())


def held_in(plan: Plan, me: RankPlan, index: int) -> tuple[Holding, ...]:
    """What lies in one slot, also where that shows a part of another one's memory."""
    return tuple(_Held(plan, me).slot(index))


class _Held:
    def __init__(self, plan: Plan, me: RankPlan) -> None:
        self.plan = plan
        self.me = me

    def all(self) -> Iterator[Holding]:
        for index, slot in enumerate(self.me.slots):
            if slot.base < 0 or slot.kind == "grad":
                yield from self.slot(index)
        for task in self.me.tasks:
            if isinstance(task, Update):
                for index in task.stepped:
                    yield from self._stepped(index)

    def slot(self, index: int) -> Iterator[Holding]:
        slot = self.me.slots[index]
        if slot.kind in ("param", "buffer"):
            part = self._part(slot.source)
            what: What = "buffer" if slot.kind == "buffer" else "param"
            yield Holding(what, slot.source, index, 0, part, 0, part.num_elements)
        elif slot.kind in ("flat", "shard", "grad"):
            bucket = self.plan.buckets[slot.bucket]
            yield from self._bucket(index, bucket, "grad" if slot.kind == "grad" else "param")

    def _bucket(self, index: int, bucket: Bucket, what: What) -> Iterator[Holding]:
        """The parameters of a bucket, as far as they lie in the part of it that the rank has."""
        begin, end = window(self.plan, self.me, self.me.slots[index])
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            part = self._part(name)
            first, last = max(offset, begin), min(offset + part.num_elements, end)
            if first < last:
                yield Holding(what, name, index, first - begin, part, first - offset, last - offset)

    def _stepped(self, index: int) -> Iterator[Holding]:
        for held in self.slot(index):
            yield msgspec.structs.replace(held, what="master")
            if self.plan.ema is not None:
                yield msgspec.structs.replace(held, what="average")
            for name, form in state_pieces(self._groups[held.tensor], held.part.size):
                yield msgspec.structs.replace(held, what="state", state=name, form=form)

    @cached_property
    def _groups(self) -> dict[str, ParamGroup]:
        """Trained parameter -> its parameter group."""
        groups = self.plan.param_groups
        trained = [bucket for bucket in self.plan.buckets if bucket.trained]
        return {p: groups[b.group_of(i)] for b in trained for i, p in enumerate(b.params)}

    def _part(self, name: str) -> Part:
        return part_of(self.plan.tensors[name], self.plan.mesh, self.me.coordinates)


def window(plan: Plan, me: RankPlan, slot: Slot) -> tuple[int, int]:
    """Which elements of its bucket a slot has: all, or the rank's part along the bucket's axes."""
    bucket = plan.buckets[slot.bucket]
    if not is_cut(plan, slot):
        return 0, bucket.size
    part, parts = me.part_along(bucket.over, plan.mesh)
    return part * bucket.size // parts, (part + 1) * bucket.size // parts


def is_cut(plan: Plan, slot: Slot) -> bool:
    """Whether a slot of a bucket has only the rank's part of it."""
    cut = slot.kind in PARTS and plan.buckets[slot.bucket].over
    return bool(cut)
