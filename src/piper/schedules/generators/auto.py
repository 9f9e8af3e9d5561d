"""Automatic zero-bubble scheduling, after arXiv 2401.10241: from measured times and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from piper.schedules.action_costs import Costs
from piper.schedules.generators.fill import Filled, fill
from piper.schedules.generators.greedy import greedy
from piper.schedules.generators.one_f_one_b import one_f_one_b
from piper.schedules.generators.request import check_sizes, refuse
from piper.schedules.generators.rows import of_kind, one_forward_one_backward
from piper.schedules.generators.zero_bubble import zb_h1, zb_h2
from piper.schedules.replay import peak_held, replay
from piper.schedules.table import Action, Table, make_table

_PATIENCE = (1e-9, 0.5)
# Warm-up forwards: so many for each later rank, and this share of those that there is time for until
# the first gradient is back, rounded by how much of a forward may delay it.
_WARMUPS = ((0, 1, 0.75), (0, 1, 0.5), (0, 1, 0), (0.5, 0.5, 0.5), (1, 0, 0), (2, 0, 0))


def auto(
    *,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_in_flight: float | None = None,
    kept: float = 1.0,
) -> Table:
    """The shortest zero-bubble table found for given costs in which no rank holds too much.

    `max_in_flight` bounds what a rank holds (PP, as in 1F1B, unless given), where a microbatch counts
    1 from F to BI and `kept` from BI to BW: 1 if the weight half needs all that was saved.

    Placement: loop
    Bubble: the smallest that the search finds
    Memory: max_in_flight
    Trades: It takes the costs of your stages and a limit on memory; the picture has equal costs.
    Published: Zero Bubble Pipeline Parallelism, arXiv 2401.10241
    """
    name = "auto"
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = costs or Costs()
    costs.check_stages(num_ranks)
    limit = num_ranks if max_in_flight is None else max_in_flight
    if not limit >= 1:
        refuse(name, f"max_in_flight is {limit}", legal="at least 1")
    if not 0 <= kept <= 1:
        refuse(name, f"kept is {kept}", legal="a share from 0 to 1")
    found = _Search(num_ranks, num_microbatches, costs, limit, kept).best()
    best, span = (
        make_table(name, found.rows, num_stages=num_ranks, num_microbatches=num_microbatches),
        found.span,
    )
    for known in (one_f_one_b, zb_h1, zb_h2):  # never worse than those that need no search
        table = known(num_ranks=num_ranks, num_microbatches=num_microbatches)
        if max(peak_held(table, kept=kept)) <= limit + 1e-9 and replay(table, costs).span < span:
            best, span = msgspec.structs.replace(table, name=name), replay(table, costs).span
    return best


class _Search:
    """Tries numbers of warm-up forwards, and how far a BW may push back what comes after it."""

    def __init__(
        self, num_ranks: int, num_microbatches: int, costs: Costs, limit: float, kept: float
    ) -> None:
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.costs, self.limit, self.kept = costs, limit, kept
        ranks = range(num_ranks)
        self.forward = [costs.of(Action(rank, "F", 0)) for rank in ranks]
        self.inward = [costs.of(Action(rank, "BI", 0)) for rank in ranks]
        self.weight = [costs.of(Action(rank, "BW", 0)) for rank in ranks]

    def best(self) -> Filled:
        goal = self._lower_bound()
        tried = [
            (self._try(warmups, goal, _PATIENCE[0]), warmups)
            for warmups in dict.fromkeys(self._warmups())
        ]
        tried.sort(key=lambda found: found[0].span)
        list_scheduled = greedy(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            limit=self.limit,
            kept=self.kept,
            costs=self.costs,
        )
        best = min(tried[0][0], list_scheduled, key=lambda f: f.span)
        for _, warmups in tried[:2]:
            for share, patience in product((0.0, 0.5, 1.0), _PATIENCE):
                if best.span > goal * (1 + 1e-12):
                    found = self._try(warmups, goal + share * (best.span - goal), patience)
                    best = min(best, found, key=lambda f: f.span)
        return best

    def _lower_bound(self) -> float:
        """No step can be shorter than a rank's work, nor than the way of the last microbatch."""
        bounds = []
        for rank in range(self.num_ranks):
            pair = self.forward[rank] + self.inward[rank]
            alone = self.num_microbatches * (pair + self.weight[rank])
            hops = 2 * rank * self.costs.comm
            there_and_back = sum(self.forward[:rank]) + sum(self.inward[:rank]) + hops
            way = there_and_back + self.num_microbatches * pair + self.weight[0]
            bounds += [alone, way]
        return max(bounds)

    def _warmups(self) -> Iterator[tuple[int, ...]]:
        """Forwards before the first backward of each rank, within memory, never fewer than later."""
        most = int(min(self.limit, self.num_microbatches))
        for each, share, rounded in _WARMUPS:
            warmups: list[int] = []
            away = 0.0  # until the first gradient is back
            for rank in reversed(range(self.num_ranks)):
                later = self.num_ranks - 1 - rank
                fits = min(away / self.forward[rank], most) if self.forward[rank] else later
                ahead = 1 + int(each * later + share * fits + rounded + 1e-9)
                warmups.append(min(max(ahead, warmups[-1] if warmups else 1), most))
                away += self.forward[rank] + self.inward[rank] + 2 * self.costs.comm
            yield tuple(reversed(warmups))

    def _try(self, warmups: Sequence[int], target: float, patience: float) -> Filled:
        rows = []
        for rank, warmup in enumerate(warmups):
            forwards = [Action(rank, "F", m) for m in range(self.num_microbatches)]
            inward = of_kind(forwards, "BI")
            rows.append(one_forward_one_backward(forwards, inward, warmup=warmup - 1))
        return fill(
            rows,
            num_stages=self.num_ranks,
            num_microbatches=self.num_microbatches,
            limit=self.limit,
            kept=self.kept,
            costs=self.costs,
            latest=self._latest(rows, target),
            patience=patience,
        )

    def _latest(self, rows: Sequence[Sequence[Action]], target: float) -> list[list[float]]:
        """For each F and BI the latest start with which the step can end by the target."""
        latest = [[0.0] * len(row) for row in rows]
        done: dict[tuple[int, str, int], float] = {}
        left = [len(row) - 1 for row in rows]
        after = [
            sum(self.forward[:rank]) + rank * self.costs.comm + target - self.weight[rank]
            for rank in range(self.num_ranks)
        ]
        ready = list(range(self.num_ranks))
        while ready:
            rank = ready.pop()
            while left[rank] >= 0:
                action = rows[rank][left[rank]]
                is_forward = action.kind == "F"
                user = rank + 1 if is_forward else rank - 1
                by = after[rank]
                if 0 <= user < self.num_ranks:
                    needed = done.get((user, action.kind, action.microbatch))
                    if needed is None:
                        break
                    by = min(by, needed - self.costs.comm)
                by -= (self.forward if is_forward else self.inward)[rank]
                latest[rank][left[rank]] = after[rank] = by
                done[rank, action.kind, action.microbatch] = by
                left[rank] -= 1
                maker = rank - 1 if is_forward else rank + 1
                if 0 <= maker < self.num_ranks:
                    ready.append(maker)
        return latest
