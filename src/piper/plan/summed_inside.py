"""summed_inside: one dispatch order in; the gradients that the bodies which make them add to their sums
by themselves, out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from piper.plan.local_order import Local
from piper.plan.tasks import Add, Run

Products = Mapping[str, tuple[int, ...]]  # body -> places of the results that are products


class Part(NamedTuple):
    """Where a gradient is added: in which sum, from which element on, and whether it starts it."""

    sum: int
    offset: int
    first: bool


NARROW = ("bfloat16", "float16")


def summed_inside(local: Local, products: Products, device: str) -> dict[int, Part]:
    """Slots that stay empty, since the body adds the product that would lie there to its sum.

    An Add of the same stream would be the only one to read it. The sum is there when the body starts,
    and nobody else touches it until the Add: all that touch it before are surely complete. Only CUDA's
    products of narrow dtypes are added so: elsewhere a sum has the bits of product and addition.
    """
    found: dict[int, Part] = {}
    if not products:
        return found
    for index, task in enumerate(local.tasks):
        if not isinstance(task, Add) or not task.offsets:
            continue
        (total,) = task.sums
        slot, times = local.slots[total], Counter(task.offsets)
        parts = [
            (term, Part(total, offset, first))
            for term, offset, first in zip(task.terms, task.offsets, task.first, strict=True)
            if times[offset] == 1 and _adds(local.slots[term].dtype, slot.dtype, device)
        ]
        if slot.pool >= 0 or task.zeros or not parts:  # zeros: it makes the sum, or clears in it
            continue
        touching = _touching(local, total, index)
        for term, part in parts:
            maker = _maker(local, term, index, products)
            if maker >= 0 and all(local.ordered(other, maker) for other in touching):
                found[term] = part
    return found


def _adds(product: str, total: str, device: str) -> bool:
    """Whether a kernel adds products of one dtype to a sum of another, where no bits are promised."""
    return device == "cuda" and product in NARROW and total in (product, "float32")


def _touching(local: Local, total: int, index: int) -> list[int]:
    """Tasks before an Add that read or write its sum."""
    root = local.root[total]
    users = {*local.writers.get(root, ()), *local.readers.get(root, ())}
    return [other for other in users if other < index]


def _maker(local: Local, term: int, index: int, products: Products) -> int:
    """The body that makes a product for this Add alone, on its stream; -1 if that is not so."""
    slot, add = local.slots[term], local.tasks[index]
    writers = local.writers.get(term, [])
    if slot.base >= 0 or slot.pool >= 0 or len(local.overlaps[term]) > 1:
        return -1
    if len(writers) != 1 or local.readers.get(term) != [index] or term not in add.frees:
        return -1
    task = local.tasks[writers[0]]
    if not isinstance(task, Run) or task.stream != add.stream or writers[0] > index:
        return -1
    places = [place for place, other in enumerate(task.outputs) if other == term]
    made = len(places) == 1 and places[0] in products.get(task.body, ())
    return writers[0] if made else -1
