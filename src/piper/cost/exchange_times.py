"""Exchange times: what communication was measured to take, kind by kind and size by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from piper.cost.machine import Curve, Linear, exchange_name


class ExchangeTime(msgspec.Struct, frozen=True):
    """One kind between so many ranks, of one machine or across several; `carried` are the bytes that a
    rank's link carries each way."""

    kind: str
    ranks: int
    across: bool
    carried: float
    seconds: float


class LinkTimes(msgspec.Struct, frozen=True):
    """`shares` are what kinds of communication take of a device from computation beside them, `issue`
    what the host needs to start one, `lanes` how many of them go on at once as fast as one alone, and
    `ranks_per_node` how many ranks a host has, where there are others.
    """

    exchanges: tuple[ExchangeTime, ...] = ()
    shares: dict[str, float] = {}
    issue: float = 0.0
    lanes: float = 1.0
    ranks_per_node: int | None = None


def fitted(points: Sequence[tuple[float, float]]) -> Linear:
    """The line through (bytes, seconds) whose relative errors are least; neither part is negative."""
    if len({size for size, _ in points}) < 2:
        return Linear(sum(seconds for _, seconds in points) / max(len(points), 1))
    # Weighted by 1 / seconds, so that small and large ones count alike.
    rows = [(1 / max(t, 1e-9), n / max(t, 1e-9)) for n, t in points]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    ya, yb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return Linear(ya / aa)
    fixed = (ya * bb - yb * ab) / determinant
    per_byte = (aa * yb - ab * ya) / determinant
    if fixed < 0:
        return Linear(0.0, yb / bb)
    if per_byte < 0:
        return Linear(ya / aa, 0.0)
    return Linear(fixed, per_byte)


def curves(found: Iterable[ExchangeTime], shares: Mapping[str, float]) -> dict[str, Curve]:
    """For a Machine's `exchanges`."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in found:
        name = exchange_name(each.kind, each.ranks, across=each.across)
        points[name].append((each.carried, each.seconds))
    return {
        name: Curve(_rising(each), shares.get(name.partition("/")[0], 0.0))
        for name, each in points.items()
    }


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """With the mean of those that a smaller one exceeds."""
    runs: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        runs.append([point])
        while len(runs) > 1 and _mean(runs[-2]) > _mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    return [(size, _mean(run)) for run in runs for size, _ in run]


def _mean(points: list[tuple[float, float]]) -> float:
    return sum(seconds for _, seconds in points) / len(points)
