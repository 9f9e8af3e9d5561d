"""Zero bubble (arXiv 2401.10241): backwards in two halves, the weight halves where a rank would wait."""

from __future__ import annotations

from piper.schedules.generators.request import check_sizes
from piper.schedules.generators.rows import delayed_weights, of_kind
from piper.schedules.table import Action, Table, make_table


def zb_h1(*, num_ranks: int, num_microbatches: int) -> Table:
    """1F1B with BW put off by r on rank r: the memory of 1F1B's first rank, a third of its bubble.

    Placement: loop
    Bubble: (PP-1)(F+B-2BW), from M = PP
    Memory: min(M, PP)
    Trades: BWs fill what would be a bubble, and no rank holds more than PP microbatches.
    Published: Zero Bubble Pipeline Parallelism, arXiv 2401.10241
    """
    return _table("zb_h1", num_ranks, num_microbatches, lead=1)


def zb_h2(*, num_ranks: int, num_microbatches: int) -> Table:
    """Eager 1F1B with BW put off by 2r on rank r: no bubble where F = BI = BW.

    Placement: loop
    Bubble: (PP-1)(F+B-3BW), from M = 2PP-1
    Memory: min(M, 2PP-1)
    Trades: From 2PP-1 microbatches on no rank waits inside of its work; each may hold 2PP-1.
    Published: Zero Bubble Pipeline Parallelism, arXiv 2401.10241
    """
    return _table("zb_h2", num_ranks, num_microbatches, lead=2)


def _table(name: str, num_ranks: int, num_microbatches: int, *, lead: int) -> Table:
    """Each rank is `lead` forwards ahead of the next one, and as much behind in its BW."""
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
        warmup, delay = lead * (num_ranks - 1 - rank), lead * rank
        rows.append(delayed_weights(forwards, of_kind(forwards, "BI"), warmup=warmup, delay=delay))
    return make_table(name, rows, num_stages=num_ranks, num_microbatches=num_microbatches)
