"""Summary: a plan in a few lines: ranks, tasks, messages and memory per class."""

from __future__ import annotations

from collections import Counter

from piper.ir.sizes import show_size
from piper.ir.values import Value
from piper.plan.types import Plan, RankClass, Slot


def summarize(plan: Plan) -> str:
    lines = [
        f"plan {plan.content_hash()}: mesh {plan.mesh}, {plan.mesh.size} ranks, "
        f"{plan.num_data_ranks} data ranks x {plan.num_microbatches} microbatches",
        f"{len(plan.bodies)} bodies, {len(plan.streams)} streams, optimizer {plan.optimizer.name}",
    ]
    for found in plan.classes:
        kinds = Counter(task.kind for task in found.tasks)
        ranks = sum(1 for _ in plan.mesh.ranks(found.slice))
        words = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        peak = peak_bytes(found)
        lines.append(f"  {found.slice} ({ranks} ranks): {len(found.tasks)} tasks: {words}")
        lines.append(
            f"    parameters {show_size(_held(found, 'param'))}, "
            f"gradients {show_size(_held(found, 'grad'))}, peak of Values {show_size(peak)}"
        )
    return "\n".join(lines)


def peak_bytes(found: RankClass) -> int:
    """The most bytes of Values that are alive at once, in dispatch order, at their bounds."""
    alive = peak = 0
    seen: set[int] = set()
    for task in found.tasks:
        for slot in task.writes:
            if slot not in seen and found.slots[slot].kind in ("temp", "sum"):
                seen.add(slot)
                alive += slot_bytes(found.slots[slot])
        peak = max(peak, alive)
        for slot in task.frees:
            if slot in seen:
                alive -= slot_bytes(found.slots[slot])
    return peak


def slot_bytes(slot: Slot) -> int:
    return Value(slot.name, "activation", slot.shape, slot.dtype, bound=slot.bound).bound_nbytes


def _held(found: RankClass, kind: str) -> int:
    return sum(slot_bytes(slot) for slot in found.slots if slot.kind == kind)
