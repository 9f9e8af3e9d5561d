"""Tasks for hand-made plans, and tasks with other slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from piper.plan.tasks import NO_SLOT, Comm, Run, Task

BODY = "0" * 16  # a body of no plan's own


def run(name: str, stream: int, *, reads: Any = (), writes: Any = (), **more: Any) -> Run:
    slots = {"inputs": tuple(reads), "outputs": tuple(writes)}
    return Run(name=name, stream=stream, **{"body": BODY, **slots, **more})


def comm(
    kind: str, name: str, stream: int, source: int = NO_SLOT, target: int = NO_SLOT, **more: Any
) -> Comm:
    common = {"group": 0, "key": name} | more
    return Comm(comm=kind, name=name, stream=stream, source=source, target=target, **common)


def with_slots(task: Task, new: Mapping[int, int], *, fields: Iterable[str] | None = None) -> Task:
    """The same task with other slots, in all fields that hold some or in these."""

    def other(value: Any) -> Any:
        return tuple(map(other, value)) if isinstance(value, tuple) else new.get(value, value)

    names = (*task.READS, *task.WRITES, "frees") if fields is None else fields
    return msgspec.structs.replace(task, **{name: other(getattr(task, name)) for name in names})
