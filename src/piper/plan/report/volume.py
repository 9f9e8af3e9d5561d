"""What a class of ranks holds and sends: bytes per kind of slot, communication per stream and kind."""

from __future__ import annotations

from collections import Counter

from piper.plan.memory_use import memory_use
from piper.plan.report.summary import slot_bytes
from piper.plan.slots import LINGERING, STAYING, Slot
from piper.plan.tasks import Comm
from piper.plan.types import Plan, RankClass


def held_bytes(found: RankClass) -> dict[str, int]:
    """Bytes of what stays from step to step, by kind; what shows a part of another counts nothing, but
    for a gradient, of which a copy stays."""
    total: Counter[str] = Counter()
    for slot, use in zip(found.slots, memory_use(found.slots, found.tasks), strict=True):
        own = slot.base < 0 or found.slots[slot.base].kind in LINGERING
        if own and slot.kind in STAYING:
            total[use if slot.kind != "constant" else "constants"] += slot_bytes(slot)
    return dict(total)


def communication(plan: Plan, found: RankClass) -> dict[tuple[str, str], tuple[int, int]]:
    """(stream, kind) -> messages and bytes of one rank, as far as sizes are known before a run."""
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for task in found.tasks:
        if isinstance(task, Comm):
            at = plan.streams[task.stream].name, task.comm
            messages, size = total.get(at, (0, 0))
            total[at] = messages + 1, size + message_bytes(found, task)
    return total


def message_bytes(found: RankClass, task: Comm) -> int:
    """What a communication leaves on this rank, or takes from it if it leaves nothing."""
    return _expected_bytes(found.slots[task.target if task.facts.leaves else task.source])


def _expected_bytes(slot: Slot) -> int:
    return slot.type.nbytes
