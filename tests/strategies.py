"""Degrees of parallelism by name; each gives 8 global microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piper.directives.schedule import Schedule
from piper.strategies import parallel

from .zoo import PIECES

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


def strategy_of(name: str, schedule: str, **more: Any) -> Callable[[Schedule], None]:
    degrees = _DEGREES[name]
    if schedule != "none":
        more["schedule"] = schedule
    return parallel(microbatches=PIECES // degrees.get("dp", 1), **degrees, **more)
