"""1F1B (PipeDream-Flush, arXiv 2006.09503): a backward as soon as there is one."""

from __future__ import annotations

from piper.schedules.generators.request import check_sizes
from piper.schedules.generators.rows import of_kind, one_forward_one_backward
from piper.schedules.table import Action, Table, make_table


def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Table:
    """Warm up with as many forwards as there are later ranks, then one forward, one backward.

    Placement: loop
    Bubble: (PP-1)(F+B)
    Memory: min(M, PP-r)
    Trades: Rank r holds at most PP-r microbatches, however many there are; the bubble is GPipe's.
    Published: PipeDream-Flush, arXiv 2006.09503
    """
    return _table("1f1b", num_ranks, num_microbatches, lead=1)


def eager_1f1b(*, num_ranks: int, num_microbatches: int) -> Table:
    """1F1B with twice the warm-up, which leaves time for each transfer between ranks.

    Placement: loop
    Bubble: (PP-1)(F+B)
    Memory: min(M, 2(PP-r)-1)
    Trades: Slow messages have time to arrive; rank r holds up to 2(PP-r)-1 microbatches instead of PP-r.
    Published: On Optimizing the Communication of Model Parallelism, arXiv 2211.05322
    """
    return _table("eager_1f1b", num_ranks, num_microbatches, lead=2)


def _table(name: str, num_ranks: int, num_microbatches: int, *, lead: int) -> Table:
    """Each rank is `lead` forwards ahead of the next one."""
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
        warmup = lead * (num_ranks - 1 - rank)
        rows.append(one_forward_one_backward(forwards, of_kind(forwards, "B"), warmup=warmup))
    return make_table(name, rows, num_stages=num_ranks, num_microbatches=num_microbatches)
