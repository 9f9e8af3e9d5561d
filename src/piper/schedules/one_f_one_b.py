"""1F1B (PipeDream-Flush, arXiv 2006.09503): a backward as soon as there is one."""

from __future__ import annotations

from piper.schedules.table import Action, Table, check_sizes, make_table


def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Table:
    """Warm up with as many forwards as there are later ranks, then one forward, one backward.

    Bubble (PP-1)(F+B); rank r holds at most PP-r microbatches. Any M of at least 1.
    """
    check_sizes("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        row = [Action(rank, "F", m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            row += [Action(rank, "F", warmup + m), Action(rank, "B", m)]
        row += [Action(rank, "B", m) for m in range(num_microbatches - warmup, num_microbatches)]
        rows.append(row)
    return make_table("1f1b", num_ranks, num_microbatches, rows)
