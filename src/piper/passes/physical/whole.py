"""whole: refuse an optimizer that looks at whole tensors where a directive cuts a parameter."""

from __future__ import annotations

from collections.abc import Sequence

from piper.errors import Call, PlanError
from piper.ir.graph import Graph
from piper.passes.physical.buckets import Bucketed
from piper.plan.optimizers import WHOLE
from piper.plan.types import Optimizer


def check_whole(
    optimizer: Optimizer,
    logical: Graph,
    bucketed: Bucketed,
    calls: Sequence[Call],
) -> None:
    if optimizer.name not in WHOLE:
        return
    for bucket, keeping in zip(bucketed.buckets, bucketed.keeping, strict=True):
        (param, *_), origin = bucket.params, keeping.origin
        if bucket.trained and keeping.split:
            origin = _shard_origin(logical, param)
        if bucket.trained and (bucket.over or keeping.split):
            raise PlanError(
                f"{optimizer.name} {WHOLE[optimizer.name]}, but each rank steps only a part of "
                f"{param}",
                call=calls[origin] if origin >= 0 else None,
                legal="replicate with zero=0 and no shard, or an optimizer that treats every "
                "element alone, such as AdamW",
            )
    if optimizer.name == "Muon":
        trained = [name for name in logical.values if bucketed.trains(name)]
        wrong = [name for name in trained if len(logical.values[name].shape) != 2]
        if wrong:
            raise PlanError(
                f"Muon steps matrices only, but {wrong[0]} is {list(logical.values[wrong[0]].shape)}",
                details=[f"{len(wrong)} of {len(trained)} trained parameters are no matrices"],
                legal="a model whose trained parameters all have two dims, or another optimizer",
            )


def _shard_origin(logical: Graph, param: str) -> int:
    for node in logical.chunks:
        if param in node.inputs:
            for owner in node.owners:
                if owner.shares == "experts":
                    return owner.origin
    return -1
