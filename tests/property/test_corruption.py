"""Whatever is changed in a slot, a task, a bucket or a tensor of a plan, it is noticed.

The plan is refused, or it runs otherwise, or another peak is planned for it: nothing that a plan stores
goes unread. Names, and the directive that a task comes from, are for people alone; `explain` shows them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from piper.check import compressed, problems
from piper.check.proofs.limit import peaks
from piper.errors import PiperError
from piper.plan.holdings import holdings
from piper.plan.report.explain import explain
from piper.plan.slots import POOLED, Slot
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan, RankClass, plan_from_json
from tests.plans import plan_of

pytestmark = pytest.mark.xdist_group("mutants")
SHOWN = ("name", "origin")
PLACES = 4  # of each field of each kind
Change = tuple[str, str, str]  # what, of which kind, which field
Mutant = Callable[[], Plan]


def _others(value: Any) -> list[Any]:
    """Values of the same type that are another one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1]
        case float():
            return [value * 2]
        case str():
            return [f"{value}x", ""] if value else ["x"]
        case None:
            return [1]
        case ():
            return [(0,), (("dp", 0),)]
        case tuple():
            changed = [
                (*value[:i], o, *value[i + 1 :])
                for i in range(len(value))
                for o in _others(value[i])
            ]
            return [value[:-1], (*value, value[-1]), *changed]
    return []


def _changes(item: Any) -> Iterator[tuple[str, Any]]:
    for field in item.__struct_fields__:
        for other in _others(getattr(item, field)):
            yield field, msgspec.structs.replace(item, **{field: other})


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _mutants(plan: Plan) -> Iterator[tuple[Change, Mutant]]:
    def in_class(number: int, what: str, index: int, item: Any) -> Plan:
        part = plan.classes[number]
        part = msgspec.structs.replace(part, **{what: _put(getattr(part, what), index, item)})
        return msgspec.structs.replace(plan, classes=_put(plan.classes, number, part))

    for number, part in enumerate(plan.classes):
        for what in ("slots", "tasks"):
            for index, item in enumerate(getattr(part, what)):
                for field, other in _changes(item):
                    change = (what, item.kind, field)
                    yield change, lambda n=number, w=what, i=index, o=other: in_class(n, w, i, o)
    for index, bucket in enumerate(plan.buckets):
        for field, other in _changes(bucket):
            buckets = _put(plan.buckets, index, other)
            yield ("bucket", "", field), lambda b=buckets: msgspec.structs.replace(plan, buckets=b)
    for name, tensor in plan.tensors.items():
        for field, other in _changes(tensor):
            tensors = {**plan.tensors, name: other}
            yield ("tensor", "", field), lambda t=tensors: msgspec.structs.replace(plan, tensors=t)


def _what_runs(plan: Plan) -> object:
    """All that Workers look at."""
    return (
        [_class(part) for part in plan.classes],
        [holdings(plan, rank) for rank in range(plan.mesh.size)],
        [(t.init, t.keys) for t in plan.tensors.values()],
    )


def _class(part: RankClass) -> object:
    filled = {task.target for task in part.tasks if isinstance(task, Comm)}
    return (
        [_task(task) for task in part.tasks],
        [_slot(slot, filled=index in filled) for index, slot in enumerate(part.slots)],
    )


def _task(task: Task) -> object:
    """Without what only labels it."""
    fields = msgspec.structs.asdict(task)
    return type(task), [
        v for k, v in fields.items() if k not in ("name", "tags", "origin", "phase")
    ]


def _slot(slot: Slot, *, filled: bool) -> object:
    """Nobody asks the type of what a body makes and another one reads."""
    made = slot.kind in POOLED and slot.bucket < 0 and not filled
    type_ = () if made else (slot.shape, slot.dtype)
    return slot.kind, type_, slot.source, slot.microbatch, slot.base, slot.offset, slot.pool


def _noticed(plan: Plan, mutant: Plan, seen: object, planned: object) -> str:
    try:
        again = plan_from_json(mutant.to_json())
        assert again.content_hash() != plan.content_hash()
        if problems(again):
            return "refused"
    except PiperError:
        return "refused"
    if _what_runs(again) != seen:
        return "runs otherwise"
    return "another peak" if peaks(compressed(again)) != planned else ""


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_every_change_of_a_plan_is_noticed(name: str, record_property: Any) -> None:
    plan = plan_of(name)
    seen, planned = _what_runs(plan), peaks(compressed(plan))
    places: dict[Change, list[Mutant]] = defaultdict(list)
    for change, mutant in _mutants(plan):
        if change[2] not in SHOWN:
            places[change].append(mutant)
    draw = random.Random(name)
    found: Counter[str] = Counter()
    for change, mutants in places.items():
        for mutant in draw.sample(mutants, min(PLACES, len(mutants))):
            how = _noticed(plan, mutant(), seen, planned)
            assert how, f"nobody notices another {change}"
            found[how] += 1
    record_property("planted", f"changes of {name}: {dict(found)}")
    assert found["refused"] > 3 * found["runs otherwise"] and found["runs otherwise"] > 20


@pytest.mark.parametrize("field", ["tags", "phase"])
def test_labels_are_refused_wherever_they_are_wrong(field: str) -> None:
    """Nothing that runs depends on them; so the checker holds them."""
    for name in ("pp", "ep", "clipped", "zero1", "zero3"):
        plan = plan_of(name)
        mutants = [m for (what, _, f), m in _mutants(plan) if (what, f) == ("tasks", field)]
        draw = random.Random(name)
        for mutant in draw.sample(mutants, min(40, len(mutants))):
            try:
                found = problems(plan_from_json(mutant().to_json()))
            except PiperError:
                continue
            assert found, f"another {field} in {name}"


def test_where_a_task_comes_from_is_shown() -> None:
    plan = plan_of("zero2")
    part = plan.classes[0]
    task = next(task for task in part.tasks if task.origin > 0)
    other = msgspec.structs.replace(task, origin=task.origin - 1)
    tasks = _put(part.tasks, part.tasks.index(task), other)
    classes = (msgspec.structs.replace(part, tasks=tasks), *plan.classes[1:])
    assert explain(msgspec.structs.replace(plan, classes=classes), task.name) != explain(
        plan, task.name
    )
