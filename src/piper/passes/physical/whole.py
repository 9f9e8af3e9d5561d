"""whole: refuse an optimizer that looks at whole tensors where a directive cuts a parameter."""

from __future__ import annotations

from collections.abc import Sequence

from piper.errors import Call, PlanError
from piper.ir.graph import Graph
from piper.passes.physical.buckets import Bucketed
from piper.plan.optimizers import WHOLE, Grouping


def check_whole(
    grouping: Grouping, logical: Graph, bucketed: Bucketed, calls: Sequence[Call]
) -> None:
    for name, group in grouping.of.items():
        optimizer = grouping.groups[group].optimizer
        if optimizer not in WHOLE or not bucketed.trains(name):
            continue
        number = bucketed.of[name]
        bucket, keeping = bucketed.buckets[number], bucketed.keeping[number]
        if bucket.over or keeping.split:
            origin = _shard_origin(logical, name) if keeping.split else keeping.origin
            raise PlanError(
                f"{optimizer} {WHOLE[optimizer]}, but each rank steps only a part of {name}",
                call=calls[origin] if origin >= 0 else None,
                legal="replicate with zero=0 and no shard, or an optimizer that treats every "
                "element alone, such as AdamW",
            )
    stepped = [n for n, g in grouping.of.items() if grouping.groups[g].optimizer == "Muon"]
    wrong = [name for name in stepped if len(logical.values[name].shape) != 2]
    if wrong:
        raise PlanError(
            f"Muon steps matrices only, but {wrong[0]} is {list(logical.values[wrong[0]].shape)}",
            details=[f"{len(wrong)} of {len(stepped)} parameters are no matrices"],
            legal="Muon for parameters with two dims and another optimizer for the rest: a function "
            "of parameters may return a list of both",
        )


def _shard_origin(logical: Graph, param: str) -> int:
    for node in logical.chunks:
        if param in node.inputs:
            for owner in node.owners:
                if owner.shares == "experts":
                    return owner.origin
    return -1
