"""Fill: rows of F and BI in, the same rows with each BW put where its rank would wait out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from piper.schedules.costs import Costs
from piper.schedules.table import Action

_NEVER = float("inf")


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
    costs = costs or Costs()
    stages = range(num_stages)
    forward = [costs.of(Action(stage, "F", 0)) for stage in stages]
    inward = [costs.of(Action(stage, "BI", 0)) for stage in stages]
    weight = [costs.of(Action(stage, "BW", 0)) for stage in stages]
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    f_done = [[_NEVER] * num_microbatches for _ in stages]
    i_done = [[_NEVER] * num_microbatches for _ in stages]
    sleepers: dict[tuple[int, bool, int], list[int]] = {}  # who waits for (stage, is F, microbatch)
    filled: list[list[Action]] = [[] for _ in rows]
    span, starts = 0.0, [_NEVER] * len(rows)
    pending: list[deque[Action]] = [deque() for _ in rows]  # the BW that can run
    position, held, since = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
    free = [(0.0, rank) for rank in range(len(rows))]

    while free:
        now, rank = heapq.heappop(free)
        row, weights, at = rows[rank], pending[rank], position[rank]
        if at == len(row):
            filled[rank] += weights
            span = max(span, now + sum(weight[w.stage] for w in weights) - starts[rank])
            continue
        action = row[at]
        stage, microbatch, is_forward = action.stage, action.microbatch, action.kind == "F"
        due, awaited = now, None
        if is_forward:
            near, others = (stage - 1, f_done) if stage else (None, f_done)
        else:
            near, others = (stage + 1, i_done) if stage + 1 < num_stages else (None, i_done)
            if f_done[stage][microbatch] == _NEVER:
                awaited = (stage, True, microbatch)
            due = max(due, f_done[stage][microbatch])
        if near is not None:
            if others[near][microbatch] == _NEVER:
                awaited = (near, is_forward, microbatch)
            apart = costs.comm if rank_of[near] != rank else 0.0
            due = max(due, others[near][microbatch] + apart)
        if weights:
            cost, wait = weight[weights[0].stage], due - now
            full = is_forward and held[rank] + 1 > limit + 1e-9
            late = latest[rank][at] + 1e-9 if latest is not None else -_NEVER
            if full or (
                wait > 0 and (wait >= cost or (wait >= patience * cost and now + cost <= late))
            ):
                filled[rank].append(weights.popleft())
                held[rank] -= kept
                heapq.heappush(free, (now + cost, rank))
                continue
        if awaited is not None:
            sleepers.setdefault(awaited, []).append(rank)
            since[rank] = now
            continue
        starts[rank] = min(starts[rank], due)
        end = due + (forward[stage] if is_forward else inward[stage])
        filled[rank].append(action)
        position[rank] += 1
        if is_forward:
            f_done[stage][microbatch] = end
            held[rank] += 1
        else:
            i_done[stage][microbatch] = end
            held[rank] -= 1 - kept
            weights.append(Action(stage, "BW", microbatch))
        heapq.heappush(free, (end, rank))
        for sleeper in sleepers.pop((stage, is_forward, microbatch), ()):
            heapq.heappush(free, (max(since[sleeper], now), sleeper))
    return Filled(filled, span)
