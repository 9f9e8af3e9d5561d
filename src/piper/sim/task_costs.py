"""Task costs: a plan's party and a machine in, the seconds that each of its tasks takes alone out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from piper.check.parties import Party
from piper.cost.estimate import added_bytes
from piper.cost.machine import Exchange, Machine
from piper.ir.tensor_type import dtype_bytes
from piper.plan.slots import Slot
from piper.plan.tasks import Add, Calling, Comm, Run, Task
from piper.plan.types import Plan


class TaskCosts(Protocol):
    """Who knows what tasks take: `compute` all of a party's, 0 for communication; `host` is the host's
    own part of one."""

    def compute(self, party: Party) -> list[float]: ...
    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange: ...
    def host(self, task: Task) -> float: ...


class MachineCosts:
    """By a machine: measured where it was, else from operations and bytes."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = plan
        self.machine = machine
        self._computed: dict[int, list[float]] = {}  # by a class's tasks
        self._exchanged: dict[tuple[int, bool], Exchange] = {}  # by a class's task

    def compute(self, party: Party) -> list[float]:
        known = self._computed.get(id(party.tasks))
        if known is None:
            known = [0.0 if isinstance(t, Comm) else self._seconds(party, t) for t in party.tasks]
            self._computed[id(party.tasks)] = known
        return known

    def _seconds(self, party: Party, task: Task) -> float:
        body = task.body if isinstance(task, Calling) else ""
        return self.machine.work_seconds(
            task.kind,
            body,
            flops=self.plan.body_flops.get(body, 0.0),
            nbytes=touched_bytes(party, task),
            dtype=_dtype(party, task),
        )

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        key = id(task), self.machine.link(ranks) is self.machine.node
        known = self._exchanged.get(key)
        if known is None:
            known = self.machine.exchange_of(
                task.facts,
                ranks,
                brought=_nbytes(party, task.source),
            )
            most = self.plan.streams[task.stream].max_sms
            if most is not None and self.machine.sms:
                known = replace(known, share=min(known.share, most / self.machine.sms))
            self._exchanged[key] = known
        return known

    def host(self, task: Task) -> float:
        return self.machine.exchange if isinstance(task, Comm) else self.machine.dispatch


@dataclass(frozen=True)
class GivenCosts:
    """Seconds by phase, and of a message, whatever the hardware: for schedules on paper."""

    phases: Mapping[str, float]
    message: float = 0.0

    def compute(self, party: Party) -> list[float]:
        phases = self.phases
        return [phases.get(t.phase, 0.0) if isinstance(t, Run) else 0.0 for t in party.tasks]

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        return Exchange(self.message if task.facts.is_message else 0.0)

    def host(self, task: Task) -> float:
        return 0.0


def meetings_of(plan: Plan, chosen: Callable[[Task], bool]) -> frozenset[str]:
    """The communications that one of the chosen tasks takes part in: of a message only the sender is
    asked how long it takes."""
    tasks = (task for found in plan.classes for task in found.tasks)
    return frozenset(task.meeting for task in tasks if isinstance(task, Comm) and chosen(task))


def touched_bytes(party: Party, task: Task) -> int:
    """Of the tensors that a task reads and writes, each counted once; of sums, only where terms lie."""
    if isinstance(task, Add):
        terms, sums = (
            [party.slots[slot].type for slot in ends] for ends in (task.terms, task.sums)
        )
        begun = sum(term.size for term, first in zip(terms, task.first, strict=True) if first)
        left = max(0, sums[0].size - begun) if task.zeros and terms else 0
        return added_bytes(terms, sums) + left * dtype_bytes(sums[0].dtype)
    slots = dict.fromkeys((*task.reads, *task.writes))
    return sum(_expected(party.slots[slot]) for slot in slots)


def _nbytes(party: Party, slot: int) -> int:
    return _expected(party.slots[slot]) if slot >= 0 else 0


def _expected(slot: Slot) -> int:
    return 0 if slot.kind == "host" else slot.type.nbytes


def _dtype(party: Party, task: Task) -> str:
    """In which a task computes: that of its largest parameter, or gradient of one, else tensor."""
    slots = [party.slots[slot] for slot in (*task.reads, *task.writes)]
    return max(slots, key=_size).dtype if slots else "float32"


def _size(slot: Slot) -> tuple[bool, int]:
    return slot.kind in ("param", "temp") and bool(slot.source), slot.type.nbytes
