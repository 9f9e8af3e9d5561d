"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473) and its zero-bubble form: several stages a rank."""

from __future__ import annotations

from piper.schedules.generators.request import check_sizes, microbatches_per_round
from piper.schedules.generators.rows import delayed_weights, one_forward_one_backward
from piper.schedules.generators.stage_placement import loop
from piper.schedules.table import Action, Kind, Table, make_table


def interleaved_1f1b(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """1F1B over several stages a rank; microbatches go in rounds of K through each of them.

    Placement: loop
    Bubble: (PP-1)(F+B), from M = PP
    Memory: min(V*M, (V-1)K + 2(PP-1-r) + 1), with V=1 min(M, PP-r)
    Requires: K = M / max(1, floor(M/PP)) a whole number
    Trades: Several small stages a rank wait less than one large one, and send more messages.
    Published: Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473
    """
    lead = 2 if stages_per_rank > 1 else 1
    return _table("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank, "B", lead)


def interleaved_zb(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """Interleaved 1F1B with half its warm-up and BW put off by r on rank r.

    Placement: loop
    Bubble: (PP-1)(F+B-2BW), from M = PP
    Memory: min(V*M, (V-1)K + PP)
    Requires: K = M / max(1, floor(M/PP)) a whole number
    Trades: BWs fill bubbles of interleaved 1F1B, and it holds less; messages are as many.
    Published: torch.distributed.pipelining, https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """
    return _table("interleaved_zb", num_ranks, num_microbatches, stages_per_rank, "BI", 1)


def _table(
    name: str, num_ranks: int, num_microbatches: int, per_rank: int, backward: Kind, lead: int
) -> Table:
    """Each rank is `lead` forwards ahead of the next one; a rank that runs BI runs BW too."""
    check_sizes(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank
    )
    per_round = microbatches_per_round(name, num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = loop(rank, num_ranks, per_rank)
        forwards = _in_rounds(stages, per_round, num_microbatches, "F")
        backwards = _in_rounds(stages[::-1], per_round, num_microbatches, backward)
        warmup = (per_rank - 1) * per_round + lead * (num_ranks - 1 - rank)
        if backward == "B":
            rows.append(one_forward_one_backward(forwards, backwards, warmup=warmup))
        else:
            rows.append(delayed_weights(forwards, backwards, warmup=warmup, delay=rank))
    return make_table(
        name, rows, num_stages=num_ranks * per_rank, num_microbatches=num_microbatches
    )


def _in_rounds(
    stages: list[int], per_round: int, num_microbatches: int, kind: Kind
) -> list[Action]:
    """Round after round of microbatches, each through one stage after the other."""
    return [
        Action(stage, kind, microbatch)
        for first in range(0, num_microbatches, per_round)
        for stage in stages
        for microbatch in range(first, first + per_round)
    ]
