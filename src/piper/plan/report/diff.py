"""diff: two plans in, what differs between them in the user's terms out."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from piper.ir.form.byte_sizes import show_size
from piper.mesh import Slice
from piper.plan.report.summary import peak_bytes
from piper.plan.report.volume import communication, held_bytes
from piper.plan.tasks import Meeting, Task
from piper.plan.types import ParamGroup, Plan, RankClass

_SHOWN = 3
_WORDS = {"body": "code"}
_ELSEWHERE = (
    "mesh", "classes", "history", "num_microbatches", "param_groups", "streams", "groups", "buckets"
)  # fmt: skip


def diff(a: Plan, b: Plan) -> str:
    """One line per difference, `A -> B`; empty if the plans do the same."""
    if _content(a) == _content(b):
        return ""
    lines = [*_directives(a, b), *_head(a, b), *_classes(a, b)]
    return "\n".join(lines or ["numbers of slots, groups or results, which no task shows"])


def _content(plan: Plan) -> dict[str, Any]:
    """The plan without the lines of the user's files: moving a strategy changes nothing."""
    fields = msgspec.structs.asdict(plan)
    return fields | {"history": [str(record) for record in plan.history]}


def _head(a: Plan, b: Plan) -> Iterator[str]:
    facts = (
        ("mesh", str(a.mesh), str(b.mesh)),
        ("ranks", str(a.mesh.size), str(b.mesh.size)),
        ("data ranks", str(a.num_data_ranks), str(b.num_data_ranks)),
        ("microbatches", str(a.num_microbatches), str(b.num_microbatches)),
        ("optimizer", _optimizer(a), _optimizer(b)),
        ("buckets", _buckets(a), _buckets(b)),
    )
    yield from (f"{what}: {x} -> {y}" for what, x, y in facts if x != y)
    yield from _sets(
        "streams", map(str, map(_stream, a.streams)), map(str, map(_stream, b.streams))
    )
    for field in Plan.__struct_fields__:
        x, y = getattr(a, field), getattr(b, field)
        if field in _ELSEWHERE or x == y:
            continue
        if isinstance(x, Mapping) or field == "bodies":
            names = [key for key in x if key in y and isinstance(x, Mapping) and x[key] != y[key]]
            yield from _sets(field, x, y)
            if names:
                yield f"{field}: {len(names)} changed: {_few(names)}"
        else:
            yield f"{field}: {x} -> {y}"


def _buckets(plan: Plan) -> str:
    """`12 with 36 parameters, cut over dp, copied over -`, per way in which they are kept."""
    ways: dict[tuple[str, str], list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        way = ",".join(bucket.over) or "-", ",".join(bucket.copies) or "-"
        ways[way].append(len(bucket.params))
    return "; ".join(
        f"{len(sizes)} with {sum(sizes)} parameters, cut over {over}, copied over {copies}"
        for (over, copies), sizes in sorted(ways.items())
    )


def _optimizer(plan: Plan) -> str:
    """`AdamW(lr=0.1)`, or several with how many parameters each steps."""
    if len(plan.param_groups) == 1:
        return _param_group(plan.param_groups[0])
    of = [b.group_of(i) for b in plan.buckets if b.trained for i in range(len(b.params))]
    return "; ".join(
        f"{_param_group(group)} for {of.count(i)} parameters"
        for i, group in enumerate(plan.param_groups)
    )


def _param_group(group: ParamGroup) -> str:
    options = ", ".join(f"{key}={value}" for key, value in sorted(group.options.items()))
    return f"{group.optimizer}({options})"


def _stream(stream: Any) -> str:
    more = [] if stream.priority == "normal" else [f"priority={stream.priority}"]
    more += [] if stream.max_sms is None else [f"max_sms={stream.max_sms}"]
    return f"{stream.name}({', '.join(more)})" if more else stream.name


def _sets(what: str, a: Iterable[str], b: Iterable[str]) -> Iterator[str]:
    mine, others = list(a), list(b)
    for name, own, other in (("A", mine, others), ("B", others, mine)):
        only = [x for x in own if x not in set(other)]
        if only:
            yield f"{what}: only in {name} ({len(only)}): {_few(only)}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _directives(a: Plan, b: Plan) -> Iterator[str]:
    before, after = ([str(record) for record in plan.history] for plan in (a, b))
    changed = [
        line
        for line in difflib.unified_diff(before, after, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if changed:
        yield "directives:"
        yield from (f"  {line[0]} {line[1:]}" for line in changed)


def _classes(a: Plan, b: Plan) -> Iterator[str]:
    mine = {found.slice: found for found in a.classes}
    others = {found.slice: found for found in b.classes}
    for at in (*mine, *(at for at in others if at not in mine)):
        if at in mine and at in others:
            lines = list(_class(a, b, mine[at], others[at]))
            if lines:
                yield f"{at}:"
                yield from (f"  {line}" for line in lines)
        else:
            yield _lonely(at, "A" if at in mine else "B", mine.get(at) or others[at])


def _lonely(at: Slice, where: str, found: RankClass) -> str:
    return f"{at}: only in {where}: {len(found.tasks)} tasks, peak {show_size(peak_bytes(found))}"


def _class(a: Plan, b: Plan, mine: RankClass, other: RankClass) -> Iterator[str]:
    x = {task.name: task for task in mine.tasks}
    y = {task.name: task for task in other.tasks}
    yield from _by_kind("only in A", [task for name, task in x.items() if name not in y])
    yield from _by_kind("only in B", [task for name, task in y.items() if name not in x])
    common = [name for name in x if name in y]
    place = {name: position for position, name in enumerate(y)}
    staying = _longest_increasing([place[name] for name in common])
    yield from _by_kind("moved", [x[n] for i, n in enumerate(common) if i not in staying])
    yield from _changed(a, b, mine, other, [(x[name], y[name]) for name in common])
    yield from _numbers("bytes of", held_bytes(mine), held_bytes(other))
    yield from _messages(communication(a, mine), communication(b, other))
    waits = [sum(len(task.waits) for task in found.tasks) for found in (mine, other)]
    if waits[0] != waits[1]:
        yield f"waits: {waits[0]} -> {waits[1]}"
    peaks = [peak_bytes(found) for found in (mine, other)]
    if peaks[0] != peaks[1]:
        yield f"peak of Values: {_sizes(*peaks)}"


def _by_kind(what: str, tasks: list[Task]) -> Iterator[str]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        kinds[task.kind].append(task.name)
    yield from (f"{what}: {len(names)} {kind}: {_few(names)}" for kind, names in kinds.items())


def _longest_increasing(positions: list[int]) -> set[int]:
    """Indexes of a longest part that is in order on both sides: the fewest tasks have moved."""
    ends: list[int] = []  # the smallest last position of a part of each length
    at: list[int] = []  # and where it stands
    before: list[int] = []
    for index, position in enumerate(positions):
        length = bisect_left(ends, position)
        ends[length : length + 1] = [position]
        at[length : length + 1] = [index]
        before.append(at[length - 1] if length else -1)
    found = set()
    index = at[-1] if at else -1
    while index >= 0:
        found.add(index)
        index = before[index]
    return found


def _changed(
    a: Plan, b: Plan, mine: RankClass, other: RankClass, pairs: list[tuple[Task, Task]]
) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for x, y in pairs:
        first, second = _facts(a, mine, x), _facts(b, other, y)
        changed = [what for what in first | second if first.get(what) != second.get(what)]
        if changed:
            found[x.kind, ", ".join(changed)].append(x.name)
    for (kind, what), names in found.items():
        yield f"changed: {len(names)} {kind} ({what}): {_few(names)}"


def _facts(plan: Plan, found: RankClass, task: Task) -> dict[str, Any]:
    """What a task is, in words that mean the same in every plan."""

    def slots(numbers: tuple[int, ...]) -> list[tuple[Any, ...]]:
        return [msgspec.structs.astuple(found.slots[number]) for number in numbers]

    origin = plan.history[task.origin] if 0 <= task.origin < len(plan.history) else None
    return {
        "kind": task.kind,
        "tags": task.tags,
        "stream": plan.streams[task.stream].name,
        "group": str(plan.groups[task.group]) if isinstance(task, Meeting) else "",
        "reads": slots(task.reads),
        "writes": slots(task.writes),
        "frees": sorted(slots(task.frees), key=str),
        "waits": sorted(found.tasks[number].name for number in task.waits),
        "origin": str(origin) if origin else "",
        **{_WORDS.get(field, field): getattr(task, field) for field in _own_fields(task)},
    }


def _own_fields(task: Task) -> list[str]:
    """What only tasks of its kind have, but for slots and groups, which are numbered in every plan."""
    elsewhere = {*Task.__struct_fields__, *task.READS, *task.WRITES, "group"}
    return [field for field in task.__struct_fields__ if field not in elsewhere]


def _numbers(what: str, a: Mapping[str, int], b: Mapping[str, int]) -> Iterator[str]:
    for kind in sorted({*a, *b}):
        x, y = a.get(kind, 0), b.get(kind, 0)
        if x != y:
            yield f"{what} {kind}: {_sizes(x, y)}"


def _sizes(x: int, y: int) -> str:
    if show_size(x) == show_size(y):
        return f"{x} B -> {y} B"
    return f"{show_size(x)} -> {show_size(y)}"


def _messages(
    a: Mapping[tuple[str, str], tuple[int, int]], b: Mapping[tuple[str, str], tuple[int, int]]
) -> Iterator[str]:
    for stream, kind in sorted({*a, *b}):
        x, y = a.get((stream, kind), (0, 0)), b.get((stream, kind), (0, 0))
        if x != y:
            yield f"{kind} on {stream}: {_message(x)} -> {_message(y)}"


def _message(found: tuple[int, int]) -> str:
    messages, size = found
    if not messages:
        return "none"
    return f"{messages} message{'s' * (messages > 1)}, {show_size(size)}"
