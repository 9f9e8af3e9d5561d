"""Few hardware queues: streams that share one hold each other up, and gates add no deadlock to that."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from functools import cache

import pytest

from piper.passes import lower
from piper.plan.tasks import Comm
from piper.plan.types import Plan, RankPlan, bind
from tests.matrix import Cell

CELLS = [
    Cell(0, "1f1b", "copied", "tied", dp=2),
    Cell(2, "zb_h2", "sharded", "moe", dp=2),
    Cell(3, "interleaved_zb", "copied", "dense", dp=2),
    Cell(1, "dualpipev", "sharded", "dropout", dp=2),
]
Meeting = tuple[tuple[int, ...], str, int]  # ranks, stream, and which of their communications


@cache
def _plan(cell: Cell) -> Plan:
    """As for a GPU: a host that starts messages early has no queues that they could hold up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "early_messages", lambda rank_class: rank_class)
        return cell.job().plan


class _Device:
    """One rank: its host dispatches in order, each queue runs in order, a read holds the host."""

    def __init__(self, plan: Plan, rank: int, queue_of: dict[int, int]) -> None:
        self.me: RankPlan = bind(plan, rank)
        self.queue_of = queue_of
        self.queues: dict[int, deque[int]] = defaultdict(deque)
        self.complete: set[int] = set()
        self.dispatched = 0
        self.meetings: dict[int, Meeting] = {}
        self.before: dict[int, int] = {}  # task -> the one before it on its stream
        last: dict[int, int] = {}
        counts: dict[tuple[tuple[int, ...], str], int] = defaultdict(int)
        for index, task in enumerate(self.me.tasks):
            if task.stream in last:
                self.before[index] = last[task.stream]
            last[task.stream] = index
            if isinstance(task, Comm):
                channel = (self.me.groups[task.group], plan.streams[task.stream].name)
                self.meetings[index] = (*channel, counts[channel])
                counts[channel] += 1

    @property
    def done(self) -> bool:
        return len(self.complete) == len(self.me.tasks)

    def dispatch(self) -> bool:
        tasks, moved = self.me.tasks, False
        while self.dispatched < len(tasks):
            index = self.dispatched
            if index and tasks[index - 1].kind == "read" and index - 1 not in self.complete:
                break
            self.queues[self.queue_of[tasks[index].stream]].append(index)
            self.dispatched += 1
            moved = True
        return moved

    def can_start(self, index: int) -> bool:
        needed = [*self.me.tasks[index].waits]
        if index in self.before:
            needed.append(self.before[index])
        return all(task in self.complete for task in needed)


def _ends(plan: Plan, mapping: list[dict[int, int]], *, gated: str) -> bool:
    """Whether a step ends. A message or collective is over when all its ranks have started it; with
    `gated` a receive ("receives"), or everybody ("all"), waits in its queue until others are there."""
    devices = [_Device(plan, rank, mapping[rank]) for rank in range(plan.mesh.size)]
    arrived: dict[Meeting, set[int]] = defaultdict(set)
    started: dict[Meeting, dict[int, int]] = defaultdict(dict)

    def passes(rank: int, kind: str, meeting: Meeting) -> bool:
        if gated == "receives":
            return kind != "recv" or bool(arrived[meeting])
        return gated == "none" or len(arrived[meeting]) == len(meeting[0])

    moved = True
    while moved:
        moved = False
        for rank, device in enumerate(devices):
            moved |= device.dispatch()
            for queue in device.queues.values():
                while queue and device.can_start(queue[0]):
                    index = queue[0]
                    meeting, kind = device.meetings.get(index), device.me.tasks[index].kind
                    if meeting is None:
                        device.complete.add(queue.popleft())
                        moved = True
                        continue
                    if gated == "all" or kind == "send":
                        moved |= rank not in arrived[meeting]
                        arrived[meeting].add(rank)
                    if not passes(rank, kind, meeting):
                        break
                    started[meeting][rank] = queue.popleft()
                    moved = True
                    if len(started[meeting]) == len(meeting[0]):
                        for other, task in started[meeting].items():
                            devices[other].complete.add(task)
    return all(device.done for device in devices)


def _mappings(plan: Plan, queues: int, seed: int) -> list[dict[int, int]]:
    numbers = random.Random(seed)
    streams = range(len(plan.streams))
    return [{s: numbers.randrange(queues) for s in streams} for _ in range(plan.mesh.size)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_gates_of_receives_add_no_deadlock(cell: Cell) -> None:
    plan = _plan(cell)
    ended = 0
    for queues in (1, 2, 3, 6):
        for seed in range(8):
            mapping = _mappings(plan, queues, seed)
            if _ends(plan, mapping, gated="none"):
                assert _ends(plan, mapping, gated="receives"), (queues, seed)
                ended += 1
    assert ended == 4 * 8  # these plans end through any queues


def test_gates_of_everybody_would() -> None:
    """What the rule is for: it was tried, and hung."""
    plan = _plan(CELLS[1])
    ends = [_ends(plan, _mappings(plan, 3, seed), gated="all") for seed in range(8)]
    assert not all(ends)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_with_a_queue_for_each_stream_all_end(cell: Cell) -> None:
    plan = _plan(cell)
    alone = [{s: s for s in range(len(plan.streams))} for _ in range(plan.mesh.size)]
    for gated in ("none", "receives", "all"):
        assert _ends(plan, alone, gated=gated)
