"""Strategy line: a plan in; its strategy in a line, such as `DualPipeV · pp 2 × dp 2 · ZeRO-2`, out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from piper.directives.order import Order
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.ir.history import degrees
from piper.plan.types import Plan
from piper.schedules.table import Table

_NAMES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "eager_1f1b": "eager 1F1B", "looped_bfs": "looped BFS",
    "interleaved_1f1b": "interleaved 1F1B", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2",
    "interleaved_zb": "interleaved zero bubble", "zbv": "ZBV", "v_half": "V-Half",
    "v_min": "V-Min", "dualpipe": "DualPipe", "dualpipev": "DualPipeV",
}  # fmt: skip


def strategy_line(plan: Plan) -> str:
    return " · ".join(_parts(plan))


def _parts(plan: Plan) -> Iterator[str]:
    directives = [record.directive for record in plan.history]
    tables = [
        d.groups.name for d in directives if isinstance(d, Order) and isinstance(d.groups, Table)
    ]
    yield from (_NAMES.get(name, name) for name in dict.fromkeys(tables) if name)
    asked = degrees(plan.history, plan.mesh)
    between = " × " if math.prod(asked.values()) == plan.mesh.size else ", "
    yield between.join(f"{name} {size}" for name, size in asked.items() if size > 1) or "one device"
    levels = sorted({d.zero for d in directives if isinstance(d, Replicate) and d.zero})
    yield from (f"ZeRO-{level}" for level in levels)
    if plan.num_microbatches > 1:
        yield f"{plan.num_microbatches} microbatches"
    kept = {d.keep for d in directives if isinstance(d, Recompute)} - {"everything"}
    if kept:
        yield "recompute"
    if not plan.train:
        yield "evaluation"
