"""gradients: contributions summed over microbatches, reduced over copies, and given to Updates."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.ir.layouts import PARTIAL, REPLICATED, STACKED, Layout, Layouts, Split, local
from piper.ir.nodes import Accumulate, Chunk, Tags, Update
from piper.ir.tensor_type import TensorType
from piper.ir.values import Role, Value
from piper.mesh import Slice
from piper.passes.physical.buckets import Bucketed
from piper.passes.physical.clip import Clip, settle
from piper.passes.physical.draft import Draft, at_slice
from piper.passes.physical.loss import Divisor
from piper.passes.physical.relayout import Way, collective
from piper.plan.types import Bucket

_Members = list[tuple[Chunk, list[str]]]  # backwards, each with its gradients of a bucket
_Contributions = dict[tuple[int, Slice], _Members]


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
        self.terms = bucket_layout(bucketed, number, over=PARTIAL, copies=PARTIAL)
        self.shards = bucket_layout(bucketed, number, over=Split(0), copies=PARTIAL)

    def run(self, contributions: _Members) -> str:
        turns = self._turns(contributions)
        if self.keeping.zero == 0:
            total = self._value("$grad", "gradient", self.terms)
            self._sum_all(contributions, total)
        elif len(turns) < 2:
            whole = self._value("$sum", "unreduced", self.terms)
            self._sum_all(contributions, whole)
            total = self._value("$grad", "gradient", self.shards, base=whole)
            self._change(f"scatter>{total}", whole, total, ())
        else:
            total = self._value("$grad", "gradient", self.shards)
            for members in turns:
                self._sum_scattered(members, total)
        return self._reduce_copies(total)

    def _turns(self, contributions: _Members) -> list[_Members]:
        """What is reduced at once: the contributions of so many microbatches."""
        by_microbatch: dict[int, _Members] = defaultdict(list)
        for node, names in contributions:
            by_microbatch[self.draft.logical.microbatch(node)].append((node, names))
        found = [by_microbatch[number] for number in sorted(by_microbatch)]
        size = self.keeping.reduce_every or max(1, len(found))
        starts = range(0, len(found), size)
        return [[one for some in found[i : i + size] for one in some] for i in starts]

    def _value(
        self,
        prefix: str,
        role: Role,
        layout: Layouts,
        suffix: str = "",
        *,
        dtype: str = "",
        base: str = "",
    ) -> str:
        name = at_slice(f"{prefix}.{self.bucket.name}{suffix}", self.at)
        type = bucket_type(self.draft, self.bucket, layout, dtype or self.bucket.sums)
        value = Value(name, role, type, layout, slice=self.at, base=base, bucket=self.number)
        return self.draft.value(value)

    def _sum_all(self, contributions: _Members, total: str) -> None:
        """Each backward adds what it has as soon as it has it."""
        for node, names in contributions:
            suffix = "" if self.keeping.zero == 0 else f">{self.bucket.name}"
            self._add(f"add>{node.name}{suffix}>{total}", names, total, node.tags)
        if not contributions:
            self._add(f"zeros>{total}", [], total, ())

    def _sum_scattered(self, members: _Members, total: str) -> None:
        """The sum of some microbatches is reduced once it is there, so that it is not whole for long."""
        tags = members[-1][0].tags
        suffix = f">{members[-1][0].name}"
        whole = self._value("$sum", "sum", self.terms, suffix)
        self._sum_all(members, whole)
        part = self._value("$part", "param_grad", self.shards, suffix, dtype=self.bucket.wire)
        self._change(f"scatter>{part}", whole, part, tags)
        self._move(f"add>{part}", part, total, tags)

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

    def _move(self, name: str, source: str, total: str, tags: Tags) -> None:
        """Add a Value that lies as a sum does; the first to come is copied, into the sum's dtype."""
        self.draft.node(
            Accumulate(
                name=name,
                tags=tags,
                inputs=(source,),
                outputs=(total,),
                slice=self.at,
                origin=self.keeping.origin,
            )
        )

    def _reduce_copies(self, total: str) -> str:
        """The sum over ranks and slices that hold the same part of the bucket."""
        value = self.draft.values[total]
        layout = tuple((axis, REPLICATED if way == PARTIAL else way) for axis, way in value.layout)
        reduced = msgspec.structs.replace(
            value, name=f"{total}~reduced", role="updated", place=total, layout=layout
        )
        key = f"reduce.{self.bucket.name}"
        name = at_slice(key, self.at)
        return self._change(name, total, reduced, (), key=key, slices=self.bucket.slices)

    def _change(
        self,
        name: str,
        source: str,
        result: str | Value,
        tags: Tags,
        *,
        key: str = "",
        slices: tuple[Slice, ...] = (),
    ) -> str:
        """A Value in another layout; the same one if it lies so already. It is cast for the wire, and
        back, where it has another dtype."""
        made = self.draft.values[source]
        read = self.draft.values[result] if isinstance(result, str) else result
        stream, origin = self.keeping.reduce_stream, self.keeping.origin
        way = Way(name, self.at, stream, origin, tags, key, slices)
        if collective(self.draft.logical.mesh, made, read, way) is None:
            return source
        self.draft.value(read)
        sent = self._on_wire(f"$wire>{name}", made, "sum")
        received = self._on_wire(f"$reduced>{name}", read, "param_grad")
        if sent is not made:
            self._move(f"cast>{name}", source, sent.name, tags)
        comm = collective(self.draft.logical.mesh, sent, received, way)
        assert comm is not None
        self.draft.node(comm)
        if received is not read:
            self._move(f"cast>{received.name}", received.name, read.name, tags)
        return read.name

    def _on_wire(self, name: str, value: Value, role: Role) -> Value:
        """A Value like another one in the dtype of the wire; itself if it has that."""
        wire = self.bucket.wire
        if value.dtype == wire:
            return value
        type = msgspec.structs.replace(value.type, dtype=wire)
        like = Value(name, role, type, value.layout, slice=self.at, bucket=self.number)
        return self.draft.values[self.draft.value(like)]


def bucket_layout(bucketed: Bucketed, number: int, *, over: Layout, copies: Layout) -> Layouts:
    """How a flat tensor of a bucket lies; along axes that split parameters each rank has its own."""
    keeping = bucketed.keeping[number]
    ways = dict.fromkeys(keeping.axes, copies) | dict.fromkeys(keeping.over, over)
    ways |= dict.fromkeys(keeping.same, REPLICATED)
    return tuple((ways | {axis: STACKED for axis, _ in keeping.split}).items())


def bucket_type(draft: Draft, bucket: Bucket, layout: Layouts, dtype: str) -> TensorType:
    return local(TensorType((bucket.size,), dtype), layout, draft.logical.mesh)


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
                    params=(*params, gradient),
                    bucket=number,
                    count=divisor.count,
                    clip=clip.largest if clip and not clip.late else None,
                    late=clip is not None and clip.late,
                )
            )
            if clip and clip.late:
                stepped = settle(draft, number, bucket, at, stepped, clip, divisor)
            if bucketed.keeping[number].zero in (1, 2):
                _gather(draft, bucketed, number, at, stepped[0])


def hold_parameters(draft: Draft, bucketed: Bucketed) -> None:
    """Give every bucket that is kept flat, or in shards, its memory, without changing any."""
    for number, bucket in enumerate(bucketed.buckets):
        for at in bucket.slices if bucketed.keeping[number].zero else ():
            _shard(draft, bucketed, number, at)


def _stepped(
    draft: Draft, bucketed: Bucketed, number: int, at: Slice, params: tuple[str, ...]
) -> tuple[str, ...]:
    """What an Update writes: the parameters, or the rank's shard of them."""
    if bucketed.keeping[number].zero == 0:
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
    layout = bucket_layout(bucketed, number, over=Split(0), copies=REPLICATED)
    shard = Value(
        at_slice(f"$shard.{bucket.name}", at),
        "shard",
        bucket_type(draft, bucket, layout, bucket.dtype),
        layout,
        slice=at,
        bucket=number,
    )
    if bucketed.keeping[number].zero < 3:
        everywhere = bucket_layout(bucketed, number, over=REPLICATED, copies=REPLICATED)
        type = bucket_type(draft, bucket, everywhere, bucket.dtype)
        draft.value(Value(whole, "flat", type, everywhere, slice=at, bucket=number))
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
    way = Way(at_slice(f"gather.{bucket.name}", at), at, keeping.gather_stream, keeping.origin)
    comm = collective(draft.logical.mesh, draft.values[shard], draft.values[new], way)
    assert comm is not None
    draft.node(comm)
