"""GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from piper.schedules.table import Action, Table, check_sizes, make_table


def gpipe(*, num_ranks: int, num_microbatches: int) -> Table:
    """All forwards in order, then all backwards in order.

    Bubble (PP-1)(F+B); activations of all M microbatches are held. Any M of at least 1.
    """
    check_sizes("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
        backwards = [Action(rank, "B", m) for m in range(num_microbatches)]
        rows.append(forwards + backwards)
    return make_table("gpipe", num_ranks, num_microbatches, rows)
