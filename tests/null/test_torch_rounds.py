"""Rounds of interleaved schedules: torch's own generator gives the same table, or refuses too."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from piper.errors import ScheduleError
from piper.schedules import schedule

OF_TORCH = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
}
Rows = list[list[str]]


def _of_torch(name: str, ranks: int, microbatches: int, per_rank: int) -> Rows | None:
    """The rows without idle time, from stages that say no more than where they are; None if refused."""
    sizes = {"group_size": ranks, "group_rank": 0, "num_stages": ranks * per_rank, "submod": None}
    stages = [SimpleNamespace(stage_index=i * ranks, **sizes) for i in range(per_rank)]
    try:
        made = OF_TORCH[name](stages, microbatches)  # type: ignore[arg-type]
    except ValueError as error:
        assert "multiple of the number of rounds" in str(error)
        return None
    return [[str(a) for a in row if a is not None] for row in made.pipeline_order.values()]


def _of_piper(name: str, ranks: int, microbatches: int, per_rank: int) -> Rows | None:
    sizes = {"num_ranks": ranks, "num_microbatches": microbatches, "stages_per_rank": per_rank}
    try:
        return [[str(cell) for cell in row] for row in schedule(name, **sizes).rows]
    except ScheduleError:
        return None


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", OF_TORCH)
def test_equals_torchs_table_for_every_number_of_microbatches(name: str, ranks: int) -> None:
    refused = set()
    for per_rank in (2, 3, 4):
        for microbatches in range(1, 41):
            theirs = _of_torch(name, ranks, microbatches, per_rank)
            assert _of_piper(name, ranks, microbatches, per_rank) == theirs, (
                per_rank,
                microbatches,
            )
            if theirs is None:
                refused.add(microbatches)
    # From twice the ranks on, what leaves a rest over the rounds; 20 on 8 ranks are two rounds of 10.
    assert refused == {m for m in range(2 * ranks, 41) if m % (m // ranks)}


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", OF_TORCH)
def test_a_refusal_names_the_nearest_numbers(name: str, ranks: int) -> None:
    legal = [m for m in range(1, 200) if _of_piper(name, ranks, m, 1) is not None]
    for microbatches in set(range(1, 101)) - set(legal):
        below = max(m for m in legal if m < microbatches)
        above = min(m for m in legal if m > microbatches)
        nearest = f"next to {microbatches}: {below} or {above} microbatches"
        with pytest.raises(ScheduleError, match=f"legal: a multiple of {ranks}, or {nearest}"):
            schedule(name, num_ranks=ranks, num_microbatches=microbatches)


def test_twenty_microbatches_on_eight_ranks_are_two_rounds_of_ten() -> None:
    table = schedule("interleaved_1f1b", num_ranks=8, num_microbatches=20)
    forwards = [str(c) for c in table.rows[7] if "F" in str(c)]
    assert forwards == [
        f"{stage}F{m}" for first in (0, 10) for stage in (7, 15) for m in range(first, first + 10)
    ]
