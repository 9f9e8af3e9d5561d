"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): several stages per rank, in a loop."""

from __future__ import annotations

from piper.schedules.placement import loop
from piper.schedules.rows import one_forward_one_backward
from piper.schedules.sizes import check_rounds, check_sizes
from piper.schedules.table import Action, Kind, Table, make_table


def interleaved_1f1b(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """1F1B over several stages a rank; microbatches go in rounds of PP through each of them.

    Placement: loop
    Bubble: (PP-1)(F+B)
    Memory: min(V*M, (V-1)PP + 2(PP-1-r) + 1), with V=1 min(M, PP-r)
    Requires: M a multiple of PP
    """
    name = "interleaved_1f1b"
    check_sizes(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    check_rounds(name, num_ranks, num_microbatches)
    lead = 2 if stages_per_rank > 1 else 1
    rows = []
    for rank in range(num_ranks):
        stages = loop(rank, num_ranks, stages_per_rank)
        rows.append(
            one_forward_one_backward(
                in_rounds(stages, num_ranks, num_microbatches, "F"),
                in_rounds(stages[::-1], num_ranks, num_microbatches, "B"),
                warmup=(stages_per_rank - 1) * num_ranks + lead * (num_ranks - 1 - rank),
            )
        )
    return make_table(
        name, rows, num_stages=num_ranks * stages_per_rank, num_microbatches=num_microbatches
    )


def in_rounds(stages: list[int], num_ranks: int, num_microbatches: int, kind: Kind) -> list[Action]:
    """Rounds of one microbatch per rank, each round through one stage after the other."""
    return [
        Action(stage, kind, microbatch)
        for first in range(0, num_microbatches, num_ranks)
        for stage in stages
        for microbatch in range(first, first + num_ranks)
    ]
