"""A bucket's sums, and what goes over the wire, have the dtypes that the plan's precision gives them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from piper.check import check_plan, problems
from piper.errors import CheckError
from piper.plan.slots import SUMS, Slot
from piper.plan.types import Plan
from tests.plans import plan_of

pytestmark = pytest.mark.xdist_group("mutants")


def _with_slots(plan: Plan, change: Callable[[Slot], Slot]) -> Plan:
    classes = (
        msgspec.structs.replace(part, slots=tuple(map(change, part.slots))) for part in plan.classes
    )
    return msgspec.structs.replace(plan, classes=tuple(classes))


def _in(dtype: str, *, of: str) -> Callable[[Slot], Slot]:
    """All slots of buckets that gradients pass through, if they have a dtype, in another one."""

    def change(slot: Slot) -> Slot:
        if slot.bucket < 0 or slot.kind not in (*SUMS, "temp") or slot.dtype != of:
            return slot
        type = msgspec.structs.replace(slot.type, dtype=dtype)
        return msgspec.structs.replace(slot, type=type)

    return change


@pytest.mark.parametrize("name", ["wire", "wire_zero1", "wire_zero2"])
def test_what_goes_over_the_wire_has_its_dtype(name: str) -> None:
    plan = plan_of(name)
    assert check_plan(plan)
    passing = {
        slot.dtype
        for part in plan.classes
        for slot in part.slots
        if slot.bucket >= 0 and slot.kind in (*SUMS, "temp")
    }
    assert passing == ({"float32"} if name == "wire" else {"float32", "float64"})
    for dtype in ("bfloat16", "float64", "int64"):
        changed = _with_slots(plan, _in(dtype, of="float32"))
        with pytest.raises(
            CheckError, match=r"summed in float64 and reduced in float32|not in float32"
        ):
            check_plan(changed)
    if "float64" in passing:
        changed = _with_slots(plan, _in("bfloat16", of="float64"))
        with pytest.raises(CheckError, match=r"\$grad\S+ shows what \$sum\S+ does not have"):
            check_plan(changed)


@pytest.mark.parametrize("name", ["dp", "zero2"])
def test_gradients_stay_as_sums_are(name: str) -> None:
    """Without a wire of its own dtype, too: float32 gradients of a float64 model are refused."""
    plan = plan_of(name)

    def narrow(slot: Slot) -> Slot:
        if slot.kind not in ("grad", "unreduced"):
            return slot
        type = msgspec.structs.replace(slot.type, dtype="float32")
        return msgspec.structs.replace(slot, type=type)

    found = problems(_with_slots(plan, narrow))
    assert any(p.proof == "updates" and "is not as bucket" in p.message for p in found)
