"""Fill: rows of F and BI in, the same rows with each BW put where its rank would wait out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from piper.schedules.action_costs import Costs
from piper.schedules.table import Action

_NEVER = float("inf")
_SLACK = 1e-9  # for sums of times and shares


class Filled(msgspec.Struct, frozen=True):
    rows: list[list[Action]]
    span: float  # the longest time of a rank from its first start to its last end


def fill(
    rows: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    num_microbatches: int,
    limit: float,
    kept: float = 1.0,
    costs: Costs | None = None,
    latest: Sequence[Sequence[float]] | None = None,
    patience: float = 1.0,
) -> Filled:
    """Add the weight half of every backward to rows of forwards and input halves.

    A BW runs where its rank has to wait: if it ends before the next action can start, or if the wait
    is at least `patience` of it and the next action can still start by `latest`, its latest time.
    It also runs before a forward for which the rank holds too much: more than `limit` microbatches,
    which count 1 from F to BI and `kept` from BI to BW. What is left runs at the end.
    """
    clock = _Clock(rows, num_stages, num_microbatches, costs or Costs())
    ranks = [_Rank(row) for row in rows]
    free = [(0.0, rank) for rank in range(len(rows))]  # when a rank decides what to do next
    while free:
        now, number = heapq.heappop(free)
        rank = ranks[number]
        if rank.position == len(rank.row):
            rank.end = now + sum(clock.cost(weight) for weight in rank.weights)
            rank.filled += rank.weights
            continue
        action = rank.row[rank.position]
        due = max(now, clock.ready(action, number))
        if rank.weights:
            cost, wait = clock.cost(rank.weights[0]), due - now
            full = action.kind == "F" and rank.held + 1 > limit + _SLACK
            pushes = latest is not None and now + cost <= latest[number][rank.position] + _SLACK
            if full or (wait > 0 and (wait >= cost or (pushes and wait >= patience * cost))):
                rank.filled.append(rank.weights.popleft())
                rank.held -= kept
                heapq.heappush(free, (now + cost, number))
                continue
        if due == _NEVER:
            clock.sleep(action, number, now)
            continue
        rank.run(action, due, kept)
        for wakes in clock.run(action, due):
            heapq.heappush(free, (max(wakes[0], now), wakes[1]))
        heapq.heappush(free, (due + clock.cost(action), number))
    return Filled([rank.filled for rank in ranks], max(rank.end - rank.start for rank in ranks))


class _Rank:
    """How far a rank is, what it holds, and the BW that it can run."""

    def __init__(self, row: Sequence[Action]) -> None:
        self.row, self.position = row, 0
        self.filled: list[Action] = []
        self.weights: deque[Action] = deque()
        self.held = 0.0
        self.start, self.end = _NEVER, 0.0

    def run(self, action: Action, due: float, kept: float) -> None:
        self.filled.append(action)
        self.position += 1
        self.start = min(self.start, due)
        if action.kind == "F":
            self.held += 1
        else:
            self.held -= 1 - kept
            self.weights.append(Action(action.stage, "BW", action.microbatch))


class _Clock:
    """When each F and BI ends, once it has started; and who sleeps until it starts."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int, costs: Costs
    ) -> None:
        self.comm, self.last = costs.comm, num_stages - 1
        self.costs = {
            kind: [costs.of(Action(stage, kind, 0)) for stage in range(num_stages)]
            for kind in ("F", "BI", "BW")
        }
        self.rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        never = [_NEVER] * num_microbatches
        self.ends = {kind: [list(never) for _ in range(num_stages)] for kind in ("F", "BI")}
        self.sleepers: dict[Action, list[tuple[float, int]]] = {}

    def cost(self, action: Action) -> float:
        return self.costs[action.kind][action.stage]

    def ready(self, action: Action, rank: int) -> float:
        """When what another stage gives is on the rank; never, as long as that has not started."""
        before = self._before(action)
        if before is None:
            return 0.0
        there = self.ends[action.kind][before][action.microbatch]
        return there if self.rank_of[before] == rank else there + self.comm

    def run(self, action: Action, start: float) -> list[tuple[float, int]]:
        """Set the end; gives who slept for it, since when."""
        self.ends[action.kind][action.stage][action.microbatch] = start + self.cost(action)
        return self.sleepers.pop(action, [])

    def sleep(self, action: Action, rank: int, now: float) -> None:
        before = self._before(action)
        assert before is not None, f"{action} waits for nothing"
        awaited = Action(before, action.kind, action.microbatch)
        self.sleepers.setdefault(awaited, []).append((now, rank))

    def _before(self, action: Action) -> int | None:
        """The stage that gives an F its input, or a BI its gradient."""
        if action.kind == "F":
            return action.stage - 1 if action.stage else None
        return action.stage + 1 if action.stage < self.last else None
