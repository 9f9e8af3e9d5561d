"""Plans of the zoo's models for tests that run nothing: by name, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from piper import Precision, where
from piper.directives.schedule import Schedule
from piper.plan.types import Plan
from piper.strategies import parallel

from .zoo import ADAMW, program_of


def sharded_state(zero: int, *, pp: int, dp: int, ep: int, **options: Any) -> Callable[..., None]:
    """Stages over `pp`, experts over `ep`, everything else, and its state, over all data ranks."""

    def strategy(s: Schedule) -> None:
        mesh = s.mesh(pp=pp, dp=dp, ep=ep)
        for stage in s.tags["PP"]:
            s.place(where(PP=stage), mesh.at(pp=stage * pp // len(s.tags["PP"])))
        s.replicate(where(EP=None), over=("dp", "ep"), zero=zero, **options)
        s.replicate(where(EP="*"), over="dp", zero=zero, **options)
        s.shard(where(EP="*"), over="ep")
        s.split(where(), "MB", 2)

    return strategy


WIRE = Precision(wire="float32")  # the models are float64
_STRATEGIES: dict[str, tuple[str, Callable[[], Callable[..., None]], dict[str, Any]]] = {
    "pp": ("tied", lambda: parallel(pp=2, microbatches=4), {}),
    "pp4": ("deep", lambda: parallel(pp=4, microbatches=4), {}),
    "dp": ("tied", lambda: parallel(dp=4, microbatches=2), {}),
    "ep": ("tied", lambda: parallel(dp=2, ep=2, microbatches=2), {}),
    "pp_dp_ep": ("tied", lambda: parallel(pp=2, dp=4, ep=2, microbatches=2), {}),
    "pp_dp8_ep": ("tied", lambda: parallel(pp=2, dp=8, ep=2, microbatches=2), {}),
    "clipped": ("tied", lambda: parallel(pp=2, dp=4, ep=2, microbatches=2), {"clip": 1.0}),
    "zero1": ("tied", lambda: sharded_state(1, pp=2, dp=2, ep=2), {"clip": 1.0, "late_clip": True}),
    "zero2": ("tied", lambda: sharded_state(2, pp=2, dp=4, ep=2, reduce_every=1), {"clip": 1.0}),
    "zero3": ("tied", lambda: sharded_state(3, pp=2, dp=2, ep=2), {}),
    "state": ("statistics", lambda: parallel(pp=2, dp=2, microbatches=4, zero=1), {}),
    "wire": ("tied", lambda: parallel(pp=2, dp=2, microbatches=2), {"precision": WIRE}),
    "wire_zero1": (
        "tied",
        lambda: sharded_state(1, pp=2, dp=2, ep=2),
        {"precision": WIRE, "clip": 1.0, "late_clip": True},
    ),
    "wire_zero2": ("tied", lambda: sharded_state(2, pp=2, dp=2, ep=2), {"precision": WIRE}),
    "zero3_reuse": ("tied", lambda: sharded_state(3, pp=2, dp=4, ep=2, reuse=2, prefetch=2), {}),
    "zero3_pairs": (
        "tied", lambda: parallel(pp=2, dp=2, microbatches=4, zero=3, reduce_every=2, reuse="step"), {}
    ),
}  # fmt: skip
NAMES = tuple(_STRATEGIES)


@cache
def plan_of(name: str) -> Plan:
    model, strategy, options = _STRATEGIES[name]
    return program_of(model).apply(strategy()).lower(optimizer=ADAMW, **options).plan
