"""Sums: what adds gradients up, prepared once per task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.plan.slots import Slot
from piper.plan.tasks import Add
from piper.plan.types import Bucket

Start = Callable[[], None]
Part = tuple[int, tuple[int, ...]]  # where a part of a flat tensor begins, and its shape
_MOST_GAPS = 8  # that are cleared one by one


def views(flat: Tensor, parts: Iterable[Part]) -> list[Tensor]:
    """The parts of a flat tensor."""
    return [flat[start : start + math.prod(shape)].view(shape) for start, shape in parts]


def parts_of(bucket: Bucket) -> list[Part]:
    """Where a bucket's parameters lie."""
    return list(zip(bucket.offsets, bucket.shapes, strict=True))


def add_values(task: Add, slots: list[Any], known: Sequence[Slot]) -> Start:
    """Add each read to the sum that is written in its place, or begin that sum with it."""
    pairs = list(zip(task.terms, task.sums, task.first, strict=True))
    rounds = _rounds([(source, total) for source, total, first in pairs if not first])
    made = [(s, t, getattr(torch, known[t].dtype)) for s, t, first in pairs if first]

    def start() -> None:
        for added in rounds:
            torch._foreach_add_([slots[t] for _, t in added], [slots[s] for s, _ in added])
        for source, total, dtype in made:
            slots[total] = slots[source].to(dtype, copy=True)

    return start


def add_to_bucket(
    task: Add,
    slots: list[Any],
    slot: Slot,
    bucket: Bucket,
    *,
    stays: bool,
    done: Sequence[bool] = (),
) -> Start:
    """Add gradients where their parameters lie in the bucket, or a part to the rank's part. Those that
    are `done` were added by the bodies that made them. If the sum's memory `stays`, its parts do."""
    (total,) = task.sums
    shape_at = dict(parts_of(bucket))
    places: list[Part] = [(0, slot.shape)] * len(task.terms)
    if task.offsets:
        places = [(offset, shape_at[offset]) for offset in task.offsets]
    done = done or [False] * len(task.terms)
    found = zip(task.terms, places, task.first, done, strict=True)
    left = [(source, place, first) for source, place, first, added in found if not added]
    copied = [(source, place) for source, place, first in left if first]
    rounds = _rounds([(source, place) for source, place, first in left if not first])
    zeros = task.zeros
    gaps = _gaps(slot.shape[0], [place for _, place in copied])
    known: list[tuple[Any, list[int], list[Tensor]]] = []
    calls: list[tuple[Any, list[tuple[int, Part]]]] = []
    if copied:
        calls.append((torch._foreach_copy_, copied))
    calls += [(torch._foreach_add_, added) for added in rounds]
    if stays:
        known = [
            (call, [s for s, _ in pairs], views(slots[total], (p for _, p in pairs)))
            for call, pairs in calls
        ]

    def start_what_stays() -> None:
        if zeros:
            _clear(slots[total], gaps)
        for call, sources, into in known:
            call(into, [slots[s] for s in sources])

    cut, kept = _cut(slot.shape[0], [place for _, place, _ in left])
    number = dict(zip(dict.fromkeys(sorted(place for _, place, _ in left)), kept, strict=True))
    flat_calls = [(c, [(s, number[p]) for s, p in pairs]) for c, pairs in calls]

    def start() -> None:
        if zeros:
            _clear(slots[total], gaps)
        pieces = slots[total].split(cut)
        for call, pairs in flat_calls:
            call([pieces[i] for _, i in pairs], [slots[s].view(-1) for s, _ in pairs])

    return start_what_stays if stays else start


def _gaps(size: int, places: list[Part]) -> list[tuple[int, int]]:
    """From where to where no place is; all of it, where there are many such gaps."""
    found, end = [], 0
    for start, shape in sorted(places):
        if start > end:
            found.append((end, start))
        end = max(end, start + math.prod(shape))
    if size > end:
        found.append((end, size))
    return found if len(found) <= _MOST_GAPS else [(0, size)]


def _clear(flat: Tensor, gaps: list[tuple[int, int]]) -> None:
    for start, end in gaps:
        flat[start:end].zero_()


def _cut(size: int, places: list[Part]) -> tuple[list[int], list[int]]:
    """Lengths to cut a flat tensor into, so that each place is a piece, and which pieces those are."""
    cut, kept, end = [], [], 0
    for start, shape in dict.fromkeys(sorted(places)):
        if start > end:
            cut.append(start - end)
        kept.append(len(cut))
        cut.append(math.prod(shape))
        end = start + math.prod(shape)
    return (cut + [size - end] if size > end else cut), kept


def _rounds(pairs: list[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """The same additions in turns of which none has a target twice."""
    seen: Counter[Any] = Counter()
    found: list[list[tuple[int, Any]]] = []
    for source, target in pairs:
        if seen[target] == len(found):
            found.append([])
        found[seen[target]].append((source, target))
        seen[target] += 1
    return found
