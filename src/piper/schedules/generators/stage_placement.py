"""Placement: which stages each rank runs."""

from __future__ import annotations


def loop(rank: int, num_ranks: int, stages_per_rank: int = 1) -> list[int]:
    """Round and round: rank r runs r, r+PP, r+2PP, ..."""
    return [rank + turn * num_ranks for turn in range(stages_per_rank)]


def vee(rank: int, num_ranks: int) -> tuple[int, int]:
    """Down and up again: rank r runs r on the way down and 2PP-1-r on the way up."""
    return rank, 2 * num_ranks - 1 - rank


def bidirectional(rank: int, num_ranks: int) -> tuple[int, int]:
    """Both ways at once: rank r runs stage r of direction 0 and stage PP-1-r of direction 1."""
    return rank, num_ranks - 1 - rank
