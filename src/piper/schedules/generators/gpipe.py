"""GPipe (arXiv 1811.06965) and looped BFS (arXiv 2211.05953): all forwards, then all backwards."""

from __future__ import annotations

from piper.schedules.generators.request import check_sizes
from piper.schedules.generators.stage_placement import loop
from piper.schedules.table import Action, Table, make_table


def gpipe(*, num_ranks: int, num_microbatches: int) -> Table:
    """All forwards in order, then all backwards in order.

    Placement: loop
    Bubble: (PP-1)(F+B)
    Memory: M
    Trades: It is the simplest order, and holds every microbatch at once.
    Published: GPipe, arXiv 1811.06965
    """
    check_sizes("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
        backwards = [Action(rank, "B", m) for m in range(num_microbatches)]
        rows.append(forwards + backwards)
    return make_table("gpipe", rows, num_stages=num_ranks, num_microbatches=num_microbatches)


def looped_bfs(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """Breadth first: a rank takes all microbatches through each of its stages before the next one.

    Placement: loop
    Bubble: (PP-1)(F+B), from M = PP
    Memory: V*M
    Trades: Smaller stages make the bubble smaller; every microbatch is held at once.
    Published: Breadth-First Pipeline Parallelism, arXiv 2211.05953
    """
    check_sizes(
        "looped_bfs",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    rows = []
    for rank in range(num_ranks):
        stages = loop(rank, num_ranks, stages_per_rank)
        forwards = [Action(stage, "F", m) for stage in stages for m in range(num_microbatches)]
        rows.append(forwards + [Action(a.stage, "B", a.microbatch) for a in reversed(forwards)])
    return make_table(
        "looped_bfs",
        rows,
        num_stages=num_ranks * stages_per_rank,
        num_microbatches=num_microbatches,
    )
