"""Task costs: a plan's party and a machine in, the seconds that each of its tasks takes alone out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from piper.check.parties import Party
from piper.cost.machine import Link, Machine
from piper.plan.slots import Slot
from piper.plan.tasks import Calling, Comm, Run, Task
from piper.plan.types import Plan


@dataclass(frozen=True)
class Exchange:
    """What a communication takes: until the first byte is there, then of a link that it has alone; and
    the share of the device while it goes on."""

    latency: float
    seconds: float = 0.0
    share: float = 0.0


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
        machine = self.machine
        if isinstance(task, Calling):
            measured = machine.bodies.get(task.body)
            if measured is not None:
                return measured
        touched = touched_bytes(party, task)
        linear = machine.kinds.get(task.kind)
        if linear is not None:
            return linear(touched)
        flops = self.plan.body_flops.get(task.body, 0.0) if isinstance(task, Calling) else 0.0
        return machine.compute_seconds(flops, touched, _dtype(party, task))

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        link = self.machine.link(ranks)
        key = id(task), link is self.machine.node
        known = self._exchanged.get(key)
        if known is None:
            known = self._exchanged[key] = self._exchange(party, task, ranks, link)
        return known

    def _exchange(self, party: Party, task: Comm, ranks: Sequence[int], link: Link) -> Exchange:
        facts, machine = task.facts, self.machine
        carried = facts.carries(
            _nbytes(party, task.source), _nbytes(party, task.target), len(ranks)
        )
        linear = machine.kinds.get(f"{task.comm}/{len(ranks)}")
        if linear is not None and link is machine.node:
            share = self._share(task, linear.share)
            if machine.host_computes:  # the host is at it from the first byte to the last
                return Exchange(0.0, linear(carried), share)
            return Exchange(linear.fixed, linear.per_byte * carried, share)
        share = self._share(task, link.share)
        latency = link.latency * facts.rounds(len(ranks))
        return Exchange(latency, carried / link.bandwidth, share)

    def _share(self, task: Comm, share: float) -> float:
        most = self.plan.streams[task.stream].max_sms
        if most is None or not self.machine.sms:
            return share
        return min(share, most / self.machine.sms)

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


def touched_bytes(party: Party, task: Task) -> int:
    """Of the tensors that a task reads and writes, each counted once."""
    slots = dict.fromkeys((*task.reads, *task.writes))
    return sum(_expected(party.slots[slot]) for slot in slots)


def _nbytes(party: Party, slot: int) -> int:
    return _expected(party.slots[slot]) if slot >= 0 else 0


def _expected(slot: Slot) -> int:
    return 0 if slot.kind == "host" else slot.type.nbytes


def _dtype(party: Party, task: Task) -> str:
    """In which a task computes: that of its largest tensor."""
    slots = [party.slots[slot] for slot in (*task.reads, *task.writes)]
    return max(slots, key=lambda slot: slot.type.nbytes).dtype if slots else "float32"
