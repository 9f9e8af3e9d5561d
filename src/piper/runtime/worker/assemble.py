"""Assemble: the parts that ranks hold in, whole tensors of the model out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from piper.plan.types import Bucket, Plan, RankPlan, bind

# name -> part of dim 0 -> that part on every rank that has it
_Copies = dict[str, dict[int, list[Tensor]]]


def whole_tensors(plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All parameters, or all their gradients, put together from their parts."""
    whole = {}
    for name, parts in _copies(plan, kind, by_rank).items():
        pieces = [parts[part][0] for part in sorted(parts)]
        whole[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    return whole


def differing_copies(plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]) -> list[str]:
    """Names of tensors whose copies are not bit-equal."""
    found = []
    for name, parts in _copies(plan, kind, by_rank).items():
        for copies in parts.values():
            if any(not torch.equal(copies[0], copy) for copy in copies[1:]):
                found.append(name)
    return found


def _copies(plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]) -> _Copies:
    found: _Copies = defaultdict(lambda: defaultdict(list))
    ranks = [bind(plan, rank) for rank in range(len(by_rank))]
    for me, held in zip(ranks, by_rank, strict=True):
        split = {s.source: s.split_over for s in me.slots if s.kind == "param"}
        for name in held.keys() & split.keys():
            found[name][me.part_along(split[name], plan.mesh)[0]].append(held[name])
    for bucket in plan.buckets:
        for place, flats in _whole_buckets(plan, bucket, ranks, by_rank).items():
            for flat in flats:
                for name, start, shape in zip(
                    bucket.params, bucket.offsets, bucket.shapes, strict=True
                ):
                    part = flat[start : start + math.prod(shape)].view(shape)
                    found[name][place].append(part)
    return found


def _whole_buckets(
    plan: Plan, bucket: Bucket, ranks: list[RankPlan], by_rank: Sequence[dict[str, Tensor]]
) -> dict[int, list[Tensor]]:
    """Per part of dim 0, every copy of a bucket, from the shards of the ranks along its axes."""
    shards: dict[tuple[tuple[str, int], ...], dict[int, Tensor]] = defaultdict(dict)
    place = {}
    for me, held in zip(ranks, by_rank, strict=True):
        if f"${bucket.name}" in held:
            rest = tuple((a, i) for a, i in me.coordinates.items() if a not in bucket.over)
            shards[rest][me.part_along(bucket.over, plan.mesh)[0]] = held[f"${bucket.name}"]
            place[rest] = me.part_along(bucket.split_over, plan.mesh)[0]
    found: dict[int, list[Tensor]] = defaultdict(list)
    for rest, parts in shards.items():
        found[place[rest]].append(torch.cat([parts[i] for i in sorted(parts)]))
    return found
