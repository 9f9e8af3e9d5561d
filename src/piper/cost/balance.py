"""Balance: costs of neighbouring units in, the contiguous parts whose largest is smallest out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


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
