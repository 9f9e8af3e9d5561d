"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): several stages per rank, in a loop."""

from __future__ import annotations

from piper.errors import ScheduleError
from piper.schedules.table import Action, Table, check_sizes, make_table, schedule_call


def interleaved_1f1b(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """1F1B over chunks of the model: rank r runs stages r, r+PP, r+2PP, ...

    Microbatches go in rounds of PP through each of a rank's stages. Bubble (PP-1)(F+B)/V for V stages
    a rank. Requires M to be a multiple of PP.
    """
    name = "interleaved_1f1b"
    check_sizes(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    if num_microbatches % num_ranks:
        up = -(-num_microbatches // num_ranks) * num_ranks
        raise ScheduleError(
            f"{num_microbatches} microbatches do not make whole rounds of {num_ranks} ranks",
            call=schedule_call(name),
            legal=f"a multiple of {num_ranks}: {up} microbatches",
        )
    total = num_microbatches * stages_per_rank
    rows = []
    for rank in range(num_ranks):
        warmup = min((num_ranks - 1 - rank) * 2 + (stages_per_rank - 1) * num_ranks, total)
        if stages_per_rank == 1:
            warmup = min(num_ranks - 1 - rank, total)
        steps = range(total)
        forwards = [_nth(i, rank, num_ranks, stages_per_rank, backward=False) for i in steps]
        backwards = [_nth(i, rank, num_ranks, stages_per_rank, backward=True) for i in steps]
        row = forwards[:warmup]
        for i in range(total - warmup):
            row += [forwards[warmup + i], backwards[i]]
        rows.append(row + backwards[total - warmup :])
    return make_table(name, num_ranks * stages_per_rank, num_microbatches, rows)


def _nth(i: int, rank: int, num_ranks: int, stages_per_rank: int, *, backward: bool) -> Action:
    """The i-th forward (or backward) of a rank: rounds of PP microbatches, stage after stage."""
    rounds, within = divmod(i, num_ranks * stages_per_rank)
    turn, offset = divmod(within, num_ranks)
    if backward:
        turn = stages_per_rank - 1 - turn
    microbatch = rounds * num_ranks + offset
    return Action(turn * num_ranks + rank, "B" if backward else "F", microbatch)
