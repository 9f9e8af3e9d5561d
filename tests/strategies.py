"""The strategies of the parity matrix, by name; each gives 8 global microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piper.directives.schedule import Schedule
from piper.strategies import parallel

from .zoo import PIECES, Case

_DEGREES: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "pp2_dp2": {"pp": 2, "dp": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
    "pp2_dp2_ep2": {"pp": 2, "dp": 4, "ep": 2},
    "pp4": {"pp": 4},
}


def strategies(case: Case, *, num_ranks: int | None = None) -> list[tuple[str, str]]:
    """(strategy, schedule) of all cases for a model; without pipeline there is no schedule."""
    found = []
    for name, degrees in _DEGREES.items():
        size, pp = degrees.get("pp", 1) * degrees.get("dp", 1), degrees.get("pp", 1)
        if (degrees.get("ep") and not case.experts) or (num_ranks and size != num_ranks):
            continue
        if pp <= case.num_stages:
            found += [(name, schedule) for schedule in _schedules(pp, case.num_stages)]
    return found


def _schedules(pp: int, num_stages: int) -> list[str]:
    """Those that a model with so many stages can train under."""
    if pp == 1:
        return ["none"]
    names = ["gpipe", "1f1b"]
    if num_stages > 2:
        names.append("eager_1f1b")
    if num_stages > pp:
        names += ["looped_bfs", "interleaved_1f1b"]
    return names


def strategy_of(name: str, schedule: str, **more: Any) -> Callable[[Schedule], None]:
    degrees = _DEGREES[name]
    more |= {} if schedule == "none" else {"schedule": schedule}
    return parallel(microbatches=PIECES // degrees.get("dp", 1), **degrees, **more)
