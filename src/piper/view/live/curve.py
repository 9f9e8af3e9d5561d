"""Curve: numbers of steps in; at most so many points, each the mean of as many steps, out."""

from __future__ import annotations

import math

MOST = 2048  # points: more than a chart has pixels
Point = tuple[int, float | None]  # a step, and its number if it has one that is finite


class Curve:
    """Steps come in rising order. As points grow too many, every two become one."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.width = 1  # numbers in a point
        self._points: list[Point] = []
        self._group: list[Point] = []

    def add(self, step: int, value: float | None) -> None:
        known = value is not None and math.isfinite(value)
        self._group.append((step, value if known else None))
        if len(self._group) < self.width:
            return
        self._points.append(_mean(self._group))
        self._group = []
        if len(self._points) >= self.most:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, self.most, 2)]
            self.width *= 2

    def cut(self, step: int) -> None:
        """Forget what comes after a step."""
        self._points = [point for point in self._points if point[0] <= step]
        self._group = [point for point in self._group if point[0] <= step]

    @property
    def points(self) -> list[Point]:
        """With the numbers that do not make a point yet."""
        return [*self._points, *([_mean(self._group)] if self._group else [])]


def _mean(points: list[Point]) -> Point:
    """At the last step."""
    known = [value for _, value in points if value is not None]
    return points[-1][0], math.fsum(known) / len(known) if known else None
