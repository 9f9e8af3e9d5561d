"""V-shaped schedules with a bound on memory: ZBV (arXiv 2401.10241), V-Half and V-Min (2405.15362)."""

from __future__ import annotations

from collections import deque

from piper.schedules.generators.fill import fill
from piper.schedules.generators.request import check_sizes
from piper.schedules.generators.stage_placement import vee
from piper.schedules.table import Action, Kind, Table, make_table, without

_F_AND_BI: tuple[Kind, ...] = ("F", "BI")
_PERIOD = 6  # slots of a microbatch on a rank: F, BI and BW of two stages

# A building block: how many slots later the next rank runs F down, F up, BI down, BI up; and how
# many slots a microbatch waits at each turn of the V.
Block = tuple[tuple[int, int, int, int], tuple[int, int, int]]


def zbv(*, num_ranks: int, num_microbatches: int) -> Table:
    """The V that has no bubble where F = BI = BW, with the memory of 1F1B's first rank.

    Placement: vee
    Bubble: 0 where F = BI = BW, from M = 2PP
    Memory: at most min(2M, 2PP)
    Trades: From 2PP microbatches on no rank waits inside of its work; messages are twice as many.
    Published: Zero Bubble Pipeline Parallelism, arXiv 2401.10241
    """
    check_sizes("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    planned = max(num_microbatches, 2 * num_ranks)  # what is too much is left out at the end
    rows = [_zbv_row(rank, num_ranks, planned) for rank in range(num_ranks)]
    return _filled("zbv", rows, num_ranks, num_microbatches, limit=2 * num_ranks)


def _zbv_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """F and BI of a rank; the limit on memory puts BW between them."""
    down, up = vee(rank, num_ranks)
    queues = {
        (stage, kind): deque(Action(stage, kind, m) for m in range(num_microbatches))
        for stage in (down, up)
        for kind in _F_AND_BI
    }
    row: list[Action] = []

    def take(*wanted: tuple[int, Kind]) -> None:
        row.extend(queues[key].popleft() for key in wanted if queues[key])

    for _ in range(2 * (num_ranks - rank) - 1):  # fill the V
        take((down, "F"))
    for _ in range(rank):  # until the first gradient is here
        take((up, "F"), (down, "F"))
    for _ in range(num_ranks - rank):  # only the way up has gradients
        take((up, "F"), (up, "BI"))
    while any(queues.values()):  # both ways in turn
        take((down, "F"), (down, "BI"), (up, "F"), (up, "BI"))
    return row


def v_half(*, num_ranks: int, num_microbatches: int) -> Table:
    """A V in which a microbatch lives half as long as in ZBV: on many ranks half of the memory of 1F1B.

    Placement: vee
    Bubble: 3PP-5 times F where F = BI = BW (5 on 4 ranks), from M = PP
    Memory: at most min(2M, PP+2)
    Trades: It gives memory for time: ranks wait a little, and wait for each of twice as many messages.
    Published: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362
    """
    block: Block = ((1, 2, 1, 2), (2, 0, 0) if num_ranks % 2 else (2, 0, 2))
    small: dict[int, Block] = {2: ((1, 1, 1, 3), (3, 3, 0)), 4: ((1, 2, 2, 1), (2, 0, 2))}
    block = small.get(num_ranks, block)
    return _repeat("v_half", num_ranks, num_microbatches, block, limit=num_ranks + 2)


def v_min(*, num_ranks: int, num_microbatches: int) -> Table:
    """A V in which a microbatch lives as short as it can: on many ranks a third of the memory of 1F1B.

    Placement: vee
    Bubble: 4PP-5 times F where F = BI = BW
    Memory: at most min(2M, 2*floor((PP+1)/3) + 2)
    Trades: It holds the least of all; a rank waits in each block, longer if messages are slow.
    Published: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362
    """
    # On a multiple of 3 ranks the tight turns would ask for two actions in one slot.
    block: Block = ((1, 1, 1, 1), (0, 0, 0) if num_ranks % 3 else (1, 0, 2))
    limit = 2 * ((num_ranks + 1) // 3) + 2
    return _repeat("v_min", num_ranks, num_microbatches, block, limit=limit)


def _repeat(name: str, num_ranks: int, num_microbatches: int, block: Block, *, limit: int) -> Table:
    """Each rank's F and BI by their slots, where microbatch m runs the block 6m slots later."""
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    (f_down, f_up, i_down, i_up), turns = block
    last = num_ranks - 1
    rows = []
    for rank in range(num_ranks):
        down, up = vee(rank, num_ranks)
        bottom = f_down * last + 1 + turns[0]
        top = bottom + f_up * last + 1 + turns[1]
        bottom_again = top + i_down * last + 1 + turns[2]
        slots = [
            (f_down * rank, down, "F"),
            (bottom + f_up * (last - rank), up, "F"),
            (top + i_down * rank, up, "BI"),
            (bottom_again + i_up * (last - rank), down, "BI"),
        ]
        timed = [
            (slot + _PERIOD * m, index, Action(stage, kind, m))  # type: ignore[arg-type]
            for m in range(num_microbatches)
            for index, (slot, stage, kind) in enumerate(slots)
        ]
        rows.append([action for _, _, action in sorted(timed)])
    return _filled(name, rows, num_ranks, num_microbatches, limit=limit)


def _filled(
    name: str, rows: list[list[Action]], num_ranks: int, num_microbatches: int, *, limit: int
) -> Table:
    num_stages = 2 * num_ranks
    planned = max(action.microbatch for action in rows[0]) + 1
    filled = fill(rows, num_stages=num_stages, num_microbatches=planned, limit=limit)
    kept = without(filled.rows, num_microbatches)
    return make_table(name, kept, num_stages=num_stages, num_microbatches=num_microbatches)
