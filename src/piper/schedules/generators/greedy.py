"""Greedy list scheduling: times and a memory limit in, rows of F, BI and BW out."""

from __future__ import annotations

import heapq
from collections import deque

from piper.schedules.action_costs import Costs
from piper.schedules.generators.fill import Filled
from piper.schedules.table import Action

_NEVER = float("inf")


def greedy(
    *, num_ranks: int, num_microbatches: int, limit: float, kept: float, costs: Costs
) -> Filled:
    """Whenever a rank is free: a BI if there is one, else an F if there is memory, else a BW.

    What `limit` and `kept` mean is said at `fill`. This is the better way where memory is short: there
    forwards and backwards in turn would wait for forwards that nobody can hold.
    """
    cost = {
        kind: [costs.of(Action(rank, kind, 0)) for rank in range(num_ranks)]
        for kind in ("F", "BI", "BW")
    }
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
    # When the next input from a neighbour is there, by kind, rank and microbatch.
    ready = {
        "F": [[0.0 if rank == 0 else _NEVER] * num_microbatches for rank in range(num_ranks)],
        "BI": [[_NEVER] * num_microbatches for _ in range(num_ranks)],
    }
    done = {"F": [0] * num_ranks, "BI": [0] * num_ranks}
    held, busy = [0.0] * num_ranks, [0.0] * num_ranks
    starts = [_NEVER] * num_ranks
    events = [(0.0, 0)]
    while events:
        now, rank = heapq.heappop(events)
        if now < busy[rank]:
            continue  # it will decide when it is free
        kind = ""
        for wanted in ("BI", "F"):
            at = done[wanted][rank]
            room = wanted == "BI" or held[rank] + 1 <= limit + 1e-9
            if at < num_microbatches and room and ready[wanted][rank][at] <= now:
                kind = wanted
                break
        if kind:
            action = Action(rank, kind, done[kind][rank])  # type: ignore[arg-type]
            done[kind][rank] += 1
        elif weights[rank]:
            action = weights[rank].popleft()
        else:
            continue  # a neighbour will wake it
        end = busy[rank] = now + cost[action.kind][rank]
        starts[rank] = min(starts[rank], now)
        rows[rank].append(action)
        heapq.heappush(events, (end, rank))
        microbatch = action.microbatch
        if action.kind == "F":
            held[rank] += 1
            if rank + 1 < num_ranks:
                ready["F"][rank + 1][microbatch] = end + costs.comm
                heapq.heappush(events, (end + costs.comm, rank + 1))
            else:
                ready["BI"][rank][microbatch] = end
        elif action.kind == "BI":
            held[rank] -= 1 - kept
            weights[rank].append(Action(rank, "BW", microbatch))
            if rank > 0:
                ready["BI"][rank - 1][microbatch] = end + costs.comm
                heapq.heappush(events, (end + costs.comm, rank - 1))
        else:
            held[rank] -= kept
    return Filled(rows, max(end - start for start, end in zip(starts, busy, strict=True)))
