"""The simulator's shortcuts change nothing, and ranks of a class cost what one of them does."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import nn

import piper
from piper.cost.presets import machine
from piper.insight.causes import Causes
from piper.insight.step_text import step_text
from piper.plan.types import Plan
from piper.sim.engine import ALONE, LEAST, Engine, Meeting, Row, Work
from piper.sim.simulate import simulate
from piper.strategies import parallel


def _random_rows(chance: random.Random) -> tuple[list[Row], list[Meeting]]:
    """Rows whose tasks compute and meet on a few streams; meetings come in one order on all rows."""
    num_rows = chance.randint(2, 6)
    meetings = [
        Meeting(
            chance.choice([0.0, chance.random()]),
            chance.choice([0.0, chance.random(), 3 * chance.random()]),
            chance.choice([0.0, 0.3, 0.6]),
            chance.random() < 0.5,
        )
        for _ in range(12)
    ]
    joined = [sorted(chance.sample(range(num_rows), chance.randint(1, num_rows))) for _ in meetings]
    rows = []
    for number in range(num_rows):
        mine = [m for m, members in enumerate(joined) if number in members]
        for _ in range(chance.randint(4, 20)):
            mine.insert(chance.randint(0, len(mine)), ALONE)
        last: dict[int, int] = {}
        needs = []
        for index, meeting in enumerate(mine):
            stream = chance.randint(0, 1) if meeting == ALONE else 2 + meeting % 3
            earlier = {i for i in range(index) if chance.random() < 0.1}
            needs.append(tuple(sorted(earlier | ({last[stream]} if stream in last else set()))))
            last[stream] = index
            if meeting != ALONE:
                meetings[meeting].members.append((number, index))
        size = len(mine)
        work = Work(
            [f"t{i}" for i in range(size)],
            [0.2 * chance.random() for _ in mine],
            needs,
            [m == ALONE and chance.random() < 0.1 for m in mine],
        )
        seconds = [chance.random() if m == ALONE else 0.0 for m in mine]
        rows.append(Row(f"row {number}", work, seconds, mine))
    return rows, meetings


class _Plainly:
    """The engine's rules, with everything looked at anew at every event."""

    def __init__(self, rows: list[Row], meetings: list[Meeting]) -> None:
        self.rows, self.meetings = rows, meetings
        self.tasks = [(r, i) for r, row in enumerate(rows) for i in range(len(row.seconds))]
        self.issued: dict[tuple[int, int], float] = {}
        self.start: dict[tuple[int, int], float] = {}
        self.end: dict[tuple[int, int], float] = {}
        self.left: dict[object, float] = {}  # of what goes on: tasks, and numbers of meetings
        self.flows_at: dict[int, float] = {}
        self.over: set[int] = set()

    def run(self) -> None:
        now = 0.0
        for row in range(len(self.rows)):
            self._dispatch(row, 0, now)
        while len(self.end) < len(self.tasks):
            while self._moves(now):
                pass
            if len(self.end) == len(self.tasks):
                return
            rates = {job: self._rate(job) for job in self.left}
            ready = [self.issued[t] for t in self.tasks if t not in self.start and self._free(t)]
            flows = [at for m, at in self.flows_at.items() if m not in self.over]
            times = [*(at for at in (*ready, *flows) if at > now)]
            ends = {job: now + left / rates[job] for job, left in self.left.items()}
            then = min([*times, *ends.values()])
            for job in self.left:
                self.left[job] -= rates[job] * (then - now)
                if ends[job] == then:
                    self.left[job] = 0.0
            now = then

    def _dispatch(self, row: int, task: int, now: float) -> None:
        work = self.rows[row].work
        for index in range(task, len(work.host)):
            now += work.host[index]
            self.issued[row, index] = now
            if work.blocks[index]:
                return

    def _free(self, task: tuple[int, int]) -> bool:
        row, index = task
        return task in self.issued and all(
            (row, i) in self.end for i in self.rows[row].work.needs[index]
        )

    def _moves(self, now: float) -> bool:
        """Whether something begins or ends now."""
        for job, left in list(self.left.items()):
            if left == 0.0:
                del self.left[job]
                self._ended(job, now)
                return True
        for task in self.tasks:
            if task not in self.start and self._free(task) and self.issued[task] <= now:
                self.start[task] = now
                row, index = task
                if self.rows[row].meeting[index] == ALONE:
                    self.left[task] = self.rows[row].seconds[index]
                return True
        for number, meeting in enumerate(self.meetings):
            if number in self.over or number in self.left:
                continue
            if number not in self.flows_at and all(m in self.start for m in meeting.members):
                self.flows_at[number] = now + meeting.latency
            if self.flows_at.get(number, now + 1) <= now:
                if meeting.seconds:
                    self.left[number] = meeting.seconds
                else:
                    self._ended(number, now)
                return True
        return False

    def _ended(self, job: object, now: float) -> None:
        tasks = self.meetings[job].members if isinstance(job, int) else [job]
        if isinstance(job, int):
            self.over.add(job)
        for row, index in tasks:
            self.end[row, index] = now
            if self.rows[row].work.blocks[index]:
                self._dispatch(row, index + 1, now)

    def _rate(self, job: object) -> float:
        flowing = [m for m in self.left if isinstance(m, int)]
        if isinstance(job, int):
            rows = {row for row, _ in self.meetings[job].members}
            return 1 / max(sum(self._goes_through(m, row) for m in flowing) for row in rows)
        row = job[0]
        taken = sum(
            m.share
            for number, m in enumerate(self.meetings)
            if number not in self.over and self._takes(number, m, row)
        )
        return max(1 - taken, LEAST) / sum(isinstance(t, tuple) and t[0] == row for t in self.left)

    def _takes(self, number: int, meeting: Meeting, row: int) -> bool:
        if meeting.holds:
            return any(m in self.start for m in meeting.members if m[0] == row)
        return number in self.left and self._goes_through(number, row)

    def _goes_through(self, number: int, row: int) -> bool:
        return any(member == row for member, _ in self.meetings[number].members)


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_gives_the_times_of_its_rules(seed: int) -> None:
    rows, meetings = _random_rows(random.Random(seed))
    plainly = _Plainly(rows, meetings)
    plainly.run()
    found = Engine(rows, meetings, host_computes=False).run([0.0] * len(rows))
    for r, i in plainly.tasks:
        times = found.issued[r][i], found.start[r][i], found.end[r][i]
        wanted = plainly.issued[r, i], plainly.start[r, i], plainly.end[r, i]
        assert times == pytest.approx(wanted, rel=1e-9, abs=1e-9), (r, i)


class _Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def _narrow_plan(dp: int, microbatches: int, *, zero: int = 2) -> Plan:
    rows = torch.ones(microbatches * dp, 4)
    program = piper.trace(_Narrow, rows, lambda model, batch: model(batch))
    often = 1 if zero > 1 else None
    strategy = parallel(
        pp=2, dp=dp, zero=zero, schedule="zbv", microbatches=microbatches, reduce_every=often
    )
    return program.apply(strategy).lower().plan


@pytest.mark.parametrize("name", ["h100", "cpu"])
@pytest.mark.parametrize("zero", [0, 3])
def test_many_ranks_have_the_times_of_their_class(name: str, zero: int) -> None:
    plan = _narrow_plan(24, 16, zero=zero)
    found = machine(name, ranks_per_node=48)  # all links alike, as for a class
    classes, ranks = (simulate(plan, found, steps=2, by_rank=each) for each in (False, True))
    assert ranks.num_spans == 24 * classes.num_spans
    for track in ranks.tracks:
        same = classes.track_of(track.ranks[0])
        for one, other in ((track.start, same.start), (track.end, same.end)):
            assert list(one) == pytest.approx(list(other), rel=1e-9)


def test_16384_ranks_cost_what_16_do() -> None:
    times: dict[int, float] = {}
    spans: dict[int, int] = {}
    plans = {dp: _narrow_plan(dp, 64) for dp in (8, 8192)}
    for dp in (8, 8192) * 3:
        begin = time.process_time()
        timeline = simulate(plans[dp], machine("h100"), steps=2)
        step_text(plans[dp], Causes(plans[dp], timeline))
        times[dp] = min(times.get(dp, 1e9), time.process_time() - begin)
        spans[dp] = timeline.num_spans
        assert sum(len(track.ranks) for track in timeline.tracks) == 2 * dp
    assert spans[8] == spans[8192] > 4000
    assert times[8192] < 3 * times[8], times
