"""The checker refuses every fault of layouts, in plans that have every row of the table of layouts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from piper.check import check_plan, expanded, problems
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Split, change_between, in_dims_of
from piper.plan.tasks import Comm
from piper.plan.types import Plan
from piper.strategies import parallel
from tests.faults import Fault
from tests.layout_faults import LAYOUT_FAULTS
from tests.tensor_zoo import program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("layout_mutants")
Record = Callable[[str, object], None]
PLACES = 16  # of one kind in one plan; where there are more, so many at random
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("dense", {"tp": 2, "dp": 2, "microbatches": 2}),
    "tp_sp": ("dense", {"tp": 2, "sp": True, "dp": 2, "zero": 1}),
    "blocks": ("fused", {"tp": 2, "sp": True}),
    "cp_tp": ("rms", {"cp": 2, "tp": 2, "sp": True}),
    "heads": ("dense", {"cp": 2, "cp_attention": "heads", "dp": 2}),
    "ring": ("dense", {"cp": 4, "cp_attention": "ring"}),
    "halves": ("dense", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}),
    "again": ("dropout", {"tp": 2, "dp": 2, "microbatches": 2, "recompute": "nothing"}),
    "again_sp": ("deep", {"tp": 2, "sp": True, "zero": 3, "dp": 2, "recompute": "nothing"}),
    "own_rows": ("mixture", {"cp": 2, "dp": 2, "ep": 2}),
    "whole_experts": ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4}),
    "again_experts": ("mixture", {"dp": 2, "ep": 2, "microbatches": 2, "recompute": "nothing"}),
    "again_whole_experts": (
        "mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4, "recompute": "nothing"}
    ),
    "again_ring": ("dense", {"cp": 2, "cp_attention": "ring", "recompute": "nothing"}),
}  # fmt: skip


@cache
def _plan(name: str) -> Plan:
    model, degrees = PLANS[name]
    return program_of(model).apply(parallel(**degrees)).lower(optimizer=ADAMW).plan


@pytest.mark.parametrize("name", PLANS)
def test_good_plans_are_accepted(name: str) -> None:
    check_plan(_plan(name))
    assert problems(expanded(_plan(name))) == []


def _planted(kind: str) -> list[Fault]:
    found = []
    for name in PLANS:
        places = list(LAYOUT_FAULTS[kind](_plan(name)))
        found += random.Random(name).sample(places, min(PLACES, len(places)))
    return found


@pytest.mark.parametrize("kind", LAYOUT_FAULTS)
def test_every_fault_is_refused_for_its_reason(kind: str, record_property: Record) -> None:
    planted = _planted(kind)
    reasons: Counter[str] = Counter()
    for fault in planted:
        found = problems(fault.plan)
        assert found, f"{kind} accepted: {sorted(fault.tasks)}"
        mine = [p for p in found if p.proof in fault.proofs]
        assert mine, f"{kind} at {sorted(fault.tasks)}: {found[0]}"
        named = {name for p in mine for name in p.tasks}
        assert named & fault.tasks, f"{sorted(fault.tasks)} not among {sorted(named)}"
        # Whatever else is wrong, such as a slot that is not written yet.
        assert {p.proof for p in mine} - {"memory", "events"}, f"only {found[0]}"
        reasons[mine[0].proof] += 1
    record_property("planted", f"{kind}: {len(planted)} planted, all refused: {dict(reasons)}")
    assert len(planted) >= 8


# What is made and what is read of it, in words, and the collective between.
ROWS = {
    ("partial", "replicated"): "all_reduce",
    ("partial", "split"): "reduce_scatter",
    ("split", "shared"): "all_gather",
    ("split", "split"): "all_to_all",
    ("split", "turn"): "shift",
}


def test_plans_have_every_row_of_the_table() -> None:
    """Forward and, by the duals, backward; what a rank takes of its own is no communication."""
    seen: dict[tuple[str, str], set[str]] = {}
    for name in PLANS:
        plan = _plan(name)
        for part in plan.classes:
            for task in part.tasks:
                if not isinstance(task, Comm) or not part.slots[task.source].cut:
                    continue
                source, target = part.slots[task.source], part.slots[task.target]
                made = in_dims_of(target.cut, source.cut, len(target.shape) - len(source.shape))
                _, axes = change_between(made, target.cut, plan.mesh)
                for axis in axes:
                    row = _word(dict(made)[axis], dict(target.cut)[axis], axis)
                    seen.setdefault(row, set()).add(task.comm)
    assert {row: {kind} for row, kind in ROWS.items()}.items() <= seen.items()


def _word(made: Any, read: Any, axis: str) -> tuple[str, str]:
    def word(way: Any) -> str:
        return {PARTIAL: "partial", REPLICATED: "replicated", SHARED: "shared"}.get(way, "split")

    turned = isinstance(made, Split) and isinstance(read, Split) and made.turn != read.turn
    return word(made), "turn" if turned else word(read)
