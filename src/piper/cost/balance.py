"""Balance: costs of neighbouring units in, the contiguous parts whose largest is smallest out.

Parts may lie together, as the stages of one device do: then the largest device is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

Together = Sequence[Sequence[int]]  # parts by their numbers, each in one of the groups


def balanced(costs: Sequence[float], num: int) -> list[int]:
    """Where each of `num` parts begins; none is empty. Needs at least `num` units.

    Of all cuts with the smallest largest part it takes one with the least sum of squares, so that the
    other parts are balanced too.
    """
    assert 1 <= num <= len(costs)
    upto = [0.0, *accumulate(costs)]
    # Sums of equal costs differ in their last bits, depending on where they start.
    most = largest(costs, num) * (1 + 1e-9)
    size = len(costs)
    best = [0.0] + [math.inf] * size  # the least sum of squares of the first i units
    begins: list[list[int]] = []
    for part in range(num):
        row, begin = [math.inf] * (size + 1), [0] * (size + 1)
        for end in range(part + 1, size - (num - part - 1) + 1):
            for start in range(end - 1, part - 1, -1):
                cost = upto[end] - upto[start]
                if cost > most:
                    break
                if best[start] + cost * cost < row[end]:
                    row[end], begin[end] = best[start] + cost * cost, start
        best = row
        begins.append(begin)
    starts = [size]
    for begin in reversed(begins):
        starts.append(begin[starts[-1]])
    return starts[:0:-1]


def largest(costs: Sequence[float], num: int) -> float:
    """The cost of the largest part under the best cut into `num` parts."""
    upto = [0.0, *accumulate(costs)]
    size = len(costs)
    best = upto[:]  # of the first i units in one part
    for part in range(1, num):
        row = [math.inf] * (size + 1)
        for end in range(part + 1, size + 1):
            # The parts before it grow with where the last part starts, and that one shrinks: the best
            # start is where they cross.
            low, high = part, end - 1
            while low < high:
                middle = (low + high) // 2
                if best[middle] >= upto[end] - upto[middle]:
                    high = middle
                else:
                    low = middle + 1
            near = (low - 1, low) if low > part else (low,)
            row[end] = min(max(best[start], upto[end] - upto[start]) for start in near)
        best = row
    return best[size]


def balanced_together(costs: Sequence[float], num: int, together: Together) -> list[int]:
    """Where each of `num` parts begins, for groups of parts whose largest is small.

    Goes from `balanced` by single units that move from one part to another, through those between
    them, as long as the largest groups get smaller, or parts more equal in the same groups.
    """
    starts = balanced(costs, num)
    if all(len(group) == 1 for group in together):
        return starts
    upto = [0.0, *accumulate(costs)]

    def worth(starts: Sequence[int]) -> tuple[list[float], float]:
        parts = [(upto[b] - upto[a]) / upto[-1] for a, b in pairwise((*starts, len(costs)))]
        groups = sorted(
            (_rounded(sum(parts[i] for i in group)) for group in together), reverse=True
        )
        return groups, _rounded(sum(part * part for part in parts))

    best, better = worth(starts), upto[-1] > 0
    while better:
        better = False
        for giver, taker in permutations(range(num), 2):
            moved = _handed_on(starts, giver, taker, len(costs))
            if moved and (found := worth(moved)) < best:
                starts, best, better = moved, found, True
    return starts


def _handed_on(starts: Sequence[int], giver: int, taker: int, size: int) -> list[int] | None:
    """One unit less for one part and one more for another; parts between them keep their number."""
    ends = (*starts[1:], size)
    if ends[giver] - starts[giver] < 2:
        return None
    first, last = sorted((giver, taker))
    by = -1 if giver < taker else 1
    return [start + by * (first < part <= last) for part, start in enumerate(starts)]


def largest_group(costs: Sequence[float], starts: Sequence[int], together: Together) -> float:
    parts = [sum(costs[a:b]) for a, b in pairwise((*starts, len(costs)))]
    return max(sum(parts[i] for i in group) for group in together)


def _rounded(share: float) -> float:
    """Sums of equal costs differ in their last bits."""
    return round(share, 9)
