"""Formulas: what the papers say a schedule's bubble and memory are, as numbers.

A bubble is a step's cost (the longest time of a rank from its first start to its last end) less the
rank's work. The texts stand in the generators' docstrings.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from piper.schedules.action_costs import Costs
from piper.schedules.generators.request import num_rounds
from piper.schedules.table import Action, Table


class Sizes(msgspec.Struct, frozen=True):
    """The letters of the formulas. PP counts ranks, K microbatches a round, `stages` all stages."""

    PP: int
    V: int
    M: int
    K: int
    stages: int
    F: float
    B: float
    BI: float
    BW: float
    FB: float


Bubble = Callable[[Sizes], float | None]


def _classic(x: Sizes) -> float:
    return (x.PP - 1) * (x.F + x.B)


def _halved(x: Sizes) -> float:
    return (x.PP - 1) * (x.F + x.BI - x.BW)  # B is BI + BW


def _dual(x: Sizes) -> float:
    return (x.stages / 2 - 1) * (x.FB + x.B - 3 * x.BW)


def _at_equal_costs(units: Callable[[Sizes], float]) -> Bubble:
    return lambda x: units(x) * x.F if x.F == x.BI == x.BW else None


def _from(least: Callable[[Sizes], int], formula: Bubble) -> Bubble:
    """The formula where there are enough microbatches for it."""
    return lambda x: formula(x) if least(x) <= x.M else None


_BUBBLE: dict[str, Bubble] = {
    "gpipe": _classic,
    "1f1b": _classic,
    "eager_1f1b": _classic,
    "looped_bfs": _from(lambda x: x.PP, _classic),
    "interleaved_1f1b": _from(lambda x: x.PP, _classic),
    "zb_h1": _from(lambda x: x.PP, _halved),
    "zb_h2": _from(lambda x: 2 * x.PP - 1, lambda x: (x.PP - 1) * (x.F + x.BI - 2 * x.BW)),
    "interleaved_zb": _from(lambda x: x.PP, _halved),
    "zbv": _from(lambda x: 2 * x.PP, _at_equal_costs(lambda x: 0)),
    "v_half": _from(
        lambda x: x.PP, _at_equal_costs(lambda x: 5 if x.PP == 4 else max(3 * x.PP - 5, 0))
    ),
    "v_min": _at_equal_costs(lambda x: max(4 * x.PP - 5, 0)),
    "dualpipe": _dual,
    "dualpipev": _dual,
}

_MEMORY: dict[str, Callable[[Sizes, int], int]] = {
    "gpipe": lambda x, r: x.M,
    "1f1b": lambda x, r: min(x.M, x.PP - r),
    "eager_1f1b": lambda x, r: min(x.M, 2 * (x.PP - r) - 1),
    "looped_bfs": lambda x, r: x.V * x.M,
    "interleaved_1f1b": lambda x, r: (
        min(x.V * x.M, (x.V - 1) * x.K + 2 * (x.PP - 1 - r) + 1) if x.V > 1 else min(x.M, x.PP - r)
    ),
    "zb_h1": lambda x, r: min(x.M, x.PP),
    "zb_h2": lambda x, r: min(x.M, 2 * x.PP - 1),
    "interleaved_zb": lambda x, r: min(x.V * x.M, (x.V - 1) * x.K + x.PP),
    "zbv": lambda x, r: min(2 * x.M, 2 * x.PP),
    "v_half": lambda x, r: min(2 * x.M, x.PP + 2),
    "v_min": lambda x, r: min(2 * x.M, 2 * ((x.PP + 1) // 3) + 2),
    "dualpipe": lambda x, r: x.stages + 1,
    "dualpipev": lambda x, r: x.stages + 1,
}


def bubble_formula(table: Table, costs: Costs) -> float | None:
    """The bubble that the formula gives, or None where there is none for these numbers."""
    sizes = _sizes(table, costs)
    if sizes is None or table.name not in _BUBBLE:
        return None
    value = _BUBBLE[table.name](sizes)
    return None if value is None else float(value)


def memory_formula(table: Table) -> list[int] | None:
    """What each rank holds at most by the formula, or None where there is none."""
    sizes = _sizes(table, Costs())
    if sizes is None or table.name not in _MEMORY:
        return None
    return [_MEMORY[table.name](sizes, rank) for rank in range(table.num_ranks)]


def _sizes(table: Table, costs: Costs) -> Sizes | None:
    """The letters, if every stage costs the same."""
    if any(isinstance(cost, tuple) for cost in (costs.F, costs.BI, costs.BW, costs.B)):
        return None
    forward, backward = costs.of(Action(0, "F", 0)), costs.of(Action(0, "B", 0))
    return Sizes(
        PP=table.num_ranks,
        V=table.stages_per_rank,
        M=table.num_microbatches,
        K=table.num_microbatches // num_rounds(table.num_ranks, table.num_microbatches),
        stages=table.num_stages,
        F=forward,
        B=backward,
        BI=costs.of(Action(0, "BI", 0)),
        BW=costs.of(Action(0, "BW", 0)),
        FB=costs.FB if costs.FB is not None else forward + backward,
    )
