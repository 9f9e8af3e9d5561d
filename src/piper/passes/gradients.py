"""gradients: contributions summed over microbatches, reduced over copies, and given to Updates."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.ir.nodes import Accumulate, Chunk, Comm, Tags, Update
from piper.ir.values import Value, accumulation_dtype
from piper.mesh import Group, Slice
from piper.passes.buckets import Bucketed
from piper.passes.clip import Clip, settle
from piper.passes.draft import Draft, at_slice
from piper.passes.loss import Divisor
from piper.plan.types import Bucket

_Contributions = dict[tuple[int, Slice], list[tuple[Chunk, list[str]]]]


def reduce_gradients(draft: Draft, bucketed: Bucketed) -> dict[tuple[int, Slice], str]:
    """Add the sums and reductions of all buckets; (bucket, slice) -> the reduced gradient."""
    found = _contributions(draft, bucketed)
    reduced = {}
    for number, bucket in enumerate(bucketed.buckets):
        for at in bucket.slices if bucket.trained else ():
            work = _Reduction(draft, bucketed, number, at)
            reduced[number, at] = work.run(found.get((number, at), []))
    return reduced


def _contributions(draft: Draft, bucketed: Bucketed) -> _Contributions:
    """Per bucket and slice, the backwards that contribute, each with its gradients."""
    found: _Contributions = defaultdict(list)
    for node in draft.nodes.values():
        if isinstance(node, Chunk) and node.phase != "F" and node.slice is not None:
            grads: dict[int, list[str]] = defaultdict(list)
            for name in node.outputs:
                value = draft.values[name]
                if value.role == "param_grad":
                    grads[bucketed.of[value.of]].append(name)
            for number, names in grads.items():
                found[number, node.slice].append((node, names))
    return found


class _Reduction:
    """The gradient of one bucket on one slice."""

    def __init__(self, draft: Draft, bucketed: Bucketed, number: int, at: Slice) -> None:
        self.draft = draft
        self.bucketed = bucketed
        self.number = number
        self.bucket: Bucket = bucketed.buckets[number]
        self.keeping = bucketed.keeping[number]
        self.at = at
        self.dtype = accumulation_dtype(self.bucket.dtype)
        self.parts = draft.logical.mesh.size_of(self.bucket.over)

    def run(self, contributions: list[tuple[Chunk, list[str]]]) -> str:
        zero = self.bucket.zero
        if zero == 0:
            total = self._value("$grad", "gradient", self.bucket.size)
            self._sum_all(contributions, total)
        elif zero == 1:
            whole = self._value("$sum", "sum", self.bucket.size)
            self._sum_all(contributions, whole)
            total = self._value("$grad", "gradient", self.bucket.size // self.parts)
            self._scatter(whole, total, ())
        else:
            total = self._value("$grad", "gradient", self.bucket.size // self.parts)
            self._sum_scattered(contributions, total)
        return self._reduce_copies(total)

    def _value(self, prefix: str, role: str, size: int, suffix: str = "") -> str:
        name = at_slice(f"{prefix}.{self.bucket.name}{suffix}", self.at)
        return self.draft.value(
            Value(name, role, (size,), self.dtype, slice=self.at, bucket=self.number)  # type: ignore[arg-type]
        )

    def _sum_all(self, contributions: list[tuple[Chunk, list[str]]], total: str) -> None:
        """Each backward adds what it has as soon as it has it."""
        for node, names in contributions:
            suffix = "" if self.bucket.zero == 0 else f">{self.bucket.name}"
            self._add(f"add>{node.name}{suffix}>{total}", names, total, node.tags)
        if not contributions:
            self._add(f"zeros>{total}", [], total, ())

    def _sum_scattered(self, contributions: list[tuple[Chunk, list[str]]], total: str) -> None:
        """Each microbatch's gradient is reduced at once, so that none is ever whole for long."""
        by_microbatch: dict[int, list[tuple[Chunk, list[str]]]] = defaultdict(list)
        for node, names in contributions:
            by_microbatch[self.draft.logical.microbatch(node)].append((node, names))
        for members in by_microbatch.values():
            tags = members[-1][0].tags
            suffix = f">{members[-1][0].name}"
            names = [name for _, found in members for name in found]
            whole = self._value("$sum", "sum", self.bucket.size, suffix)
            self._add(f"pack>{whole}", names, whole, tags)
            part = self._value("$part", "param_grad", self.bucket.size // self.parts, suffix)
            self._scatter(whole, part, tags)
            self.draft.node(
                Accumulate(
                    name=f"add>{part}",
                    tags=tags,
                    inputs=(part,),
                    outputs=(total,),
                    slice=self.at,
                    origin=self.keeping.origin,
                )
            )
        if not contributions:
            self._add(f"zeros>{total}", [], total, ())

    def _add(self, name: str, names: list[str], total: str, tags: Tags) -> None:
        offsets = [self.bucketed.offset(self.draft.values[grad].of) for grad in names]
        self.draft.node(
            Accumulate(
                name=name,
                tags=tags,
                inputs=tuple(names),
                outputs=(total,),
                slice=self.at,
                origin=self.keeping.origin,
                offsets=tuple(offsets),
            )
        )

    def _scatter(self, whole: str, part: str, tags: Tags) -> None:
        group = Group((self.at,), self.bucket.over)
        self._comm("reduce_scatter", f"scatter>{part}", whole, part, group, tags)

    def _reduce_copies(self, total: str) -> str:
        """The sum over ranks and slices that hold the same part of the bucket."""
        group = Group(self.bucket.slices, self.bucket.copies)
        if group.size(self.draft.logical.mesh) == 1:
            return total
        value = self.draft.values[total]
        reduced = self.draft.like(value, f"{total}~reduced", self.at, role="updated", place=total)
        key = f"reduce.{self.bucket.name}"
        self._comm("all_reduce", at_slice(key, self.at), total, reduced, group, (), key)
        return reduced

    def _comm(
        self,
        kind: str,
        name: str,
        source: str,
        result: str,
        group: Group,
        tags: Tags,
        key: str = "",
    ) -> None:
        self.draft.node(
            Comm(
                name=name,
                tags=tags,
                inputs=(source,),
                outputs=(result,),
                slice=self.at,
                stream=self.keeping.reduce_stream,
                origin=self.keeping.origin,
                comm=kind,
                group=group,
                key=key or name,
            )
        )


def update_parameters(
    draft: Draft,
    bucketed: Bucketed,
    gradients: dict[tuple[int, Slice], str],
    divisor: Divisor,
    clip: Clip | None,
) -> None:
    """Add the Update of every bucket on every slice, and the gather of what it has changed."""
    for number, bucket in enumerate(bucketed.buckets):
        for at in bucket.slices:
            params = tuple(at_slice(name, at) for name in bucket.params)
            stepped = _stepped(draft, bucketed, number, at, params)
            if not bucket.trained:
                continue
            gradient = gradients[number, at]
            stepped = (*stepped, _averaged(draft, gradient, at))
            inputs = [gradient]
            inputs += [divisor.values[at]] if divisor.values else []
            inputs += [clip.norms[at]] if clip and not clip.late else []
            draft.node(
                Update(
                    name=at_slice(f"update.{bucket.name}", at),
                    inputs=tuple(inputs),
                    outputs=stepped,
                    slice=at,
                    origin=bucketed.keeping[number].origin,
                    params=(*(params if bucket.zero < 3 else ()), gradient),
                    bucket=number,
                    count=divisor.count,
                    clip=clip.largest if clip and not clip.late else None,
                    late=clip is not None and clip.late,
                )
            )
            if clip and clip.late:
                stepped = settle(draft, number, bucket, at, stepped, clip, divisor)
            if bucket.zero in (1, 2):
                _gather(draft, bucketed, number, at, stepped[0])


def hold_parameters(draft: Draft, bucketed: Bucketed) -> None:
    """Give every bucket that is kept flat, or in shards, its memory, without changing any."""
    for number, bucket in enumerate(bucketed.buckets):
        for at in bucket.slices if bucket.zero else ():
            _shard(draft, bucketed, number, at)


def _stepped(
    draft: Draft, bucketed: Bucketed, number: int, at: Slice, params: tuple[str, ...]
) -> tuple[str, ...]:
    """What an Update writes: the parameters, or the rank's shard of them."""
    if bucketed.buckets[number].zero == 0:
        return tuple(
            draft.like(draft.values[name], f"{name}~new", at, role="updated", place=name)
            for name in params
        )
    shard = _shard(draft, bucketed, number, at)
    return (draft.like(shard, f"{shard.name}~new", at, role="updated", place=shard.name, base=""),)


def _shard(draft: Draft, bucketed: Bucketed, number: int, at: Slice) -> Value:
    """The rank's shard of a bucket: alone, or a part of the flat parameters that are kept whole."""
    bucket = bucketed.buckets[number]
    whole = at_slice(f"$flat.{bucket.name}", at)
    size = bucket.size // draft.logical.mesh.size_of(bucket.over)
    shard = Value(
        at_slice(f"$shard.{bucket.name}", at),
        "shard",
        (size,),
        bucket.dtype,
        slice=at,
        bucket=number,
    )
    if bucket.zero < 3:
        draft.value(Value(whole, "flat", (bucket.size,), bucket.dtype, slice=at, bucket=number))
        shard = msgspec.structs.replace(shard, base=whole)
        for param, offset in zip(bucket.params, bucket.offsets, strict=True):
            value = draft.values.get(at_slice(param, at))
            if value is not None:
                draft.values[value.name] = msgspec.structs.replace(value, base=whole, offset=offset)
    draft.value(shard)
    return shard


def _averaged(draft: Draft, gradient: str, at: Slice) -> str:
    """The gradient after it was divided, in the same place."""
    value = draft.values[gradient]
    place = value.place or gradient
    return draft.like(value, f"{gradient}~averaged", at, role="updated", place=place)


def _gather(draft: Draft, bucketed: Bucketed, number: int, at: Slice, shard: str) -> None:
    bucket, keeping = bucketed.buckets[number], bucketed.keeping[number]
    whole = draft.values[at_slice(f"$flat.{bucket.name}", at)]
    new = draft.like(whole, f"{whole.name}~new", at, role="updated", place=whole.name)
    name = at_slice(f"gather.{bucket.name}", at)
    draft.node(
        Comm(
            name=name,
            inputs=(shard,),
            outputs=(new,),
            slice=at,
            stream=keeping.gather_stream,
            origin=keeping.origin,
            comm="all_gather",
            group=Group((at,), bucket.over),
            key=name,
        )
    )
