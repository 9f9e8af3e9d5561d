"""buckets: which parameters are reduced, updated and gathered together, and how they lie in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.errors import AxisError, Call
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Owner
from piper.ir.values import Value, dtype_bytes
from piper.mesh import Slice
from piper.plan.body_spec import TensorSpec
from piper.plan.types import Bucket

ALIGNMENT = 16  # bytes; kernels load parameters in words of this size
WHOLE_SIZE = 25 << 20  # bytes of a bucket whose parameters stay whole, unless the user says


@dataclass(frozen=True)
class Keeping:
    """How a parameter is kept: along which axes it is cut, copied and divided among experts."""

    over: tuple[str, ...]
    copies: tuple[str, ...]
    split_over: tuple[str, ...]
    zero: int
    bucket_size: int | None
    prefetch: int
    reuse: int
    reduce_stream: str
    gather_stream: str
    origin: int


@dataclass
class _Parameter:
    keeping: Keeping
    slices: set[Slice] = field(default_factory=set)
    users: set[int] = field(default_factory=set)  # numbers of chunks
    stages: set[tuple[str, int] | None] = field(default_factory=set)
    trained: bool = False


@dataclass(frozen=True)
class Bucketed:
    """All buckets, how each is kept, and where to find a parameter."""

    buckets: tuple[Bucket, ...]
    keeping: tuple[Keeping, ...]
    of: dict[str, int]

    def offset(self, param: str) -> int:
        bucket = self.buckets[self.of[param]]
        return bucket.offsets[bucket.params.index(param)]


def make_buckets(
    logical: Graph, specs: Mapping[str, TensorSpec], calls: Sequence[Call]
) -> Bucketed:
    """Buckets of all parameters that get a gradient; `specs` has their whole shapes.

    A bucket holds parameters that live on the same slices and are kept alike. Where each use of them
    matters (ZeRO 2 and 3) the same chunks read all of it; else its size decides.
    """
    params = _parameters(logical, calls)
    local = {
        name: _local(specs[name], logical.mesh.size_of(param.keeping.split_over))
        for name, param in params.items()
    }
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, param in params.items():
        if param.trained:
            near = frozenset(param.users if param.keeping.zero > 1 else param.stages)
            key = (frozenset(param.slices), near, param.keeping, specs[name].dtype)
            groups[key].append(name)
    buckets: list[Bucket] = []
    keeping: list[Keeping] = []
    of: dict[str, int] = {}
    for names in groups.values():
        for part in _packed(local, names, params[names[0]].keeping):
            of |= dict.fromkeys(part, len(buckets))
            keeping.append(params[part[0]].keeping)
            parts = logical.mesh.size_of(keeping[-1].over)
            buckets.append(_layout(f"b{len(buckets)}", local, part, params[part[0]], parts))
    return Bucketed(tuple(buckets), tuple(keeping), of)


def _parameters(logical: Graph, calls: Sequence[Call]) -> dict[str, _Parameter]:
    found: dict[str, _Parameter] = {}
    keepings: dict[tuple[Owner, ...], Keeping] = {}
    for node in logical.chunks:
        if node.owners not in keepings:
            keepings[node.owners] = _keeping(logical, node, calls)
        for name in (*node.inputs, *node.outputs):
            value = logical.values[name]
            if value.role not in ("param", "param_grad"):
                continue
            param = value.of if value.role == "param_grad" else name
            known = found.setdefault(param, _Parameter(keepings[node.owners]))
            _check_alike(param, known.keeping, keepings[node.owners], calls)
            assert node.slice is not None
            known.slices.add(node.slice)
            known.users.add(node.chunk)
            known.stages.add(node.tags[0] if node.tags else None)
            known.trained |= value.role == "param_grad"
    return found


def _check_alike(param: str, one: Keeping, other: Keeping, calls: Sequence[Call]) -> None:
    ways = [(k.over, k.copies, k.zero, k.reuse, k.prefetch) for k in (one, other)]
    if ways[0] != ways[1]:
        raise AxisError(
            f"{param} is kept in two ways by the regions that read it",
            call=calls[other.origin] if other.origin >= 0 else None,
            details=[f"zero={k.zero} over {', '.join(k.over + k.copies)}" for k in (one, other)],
            legal="the same replicate for all regions that share a parameter",
        )


def _keeping(logical: Graph, node: Chunk, calls: Sequence[Call]) -> Keeping:
    mesh = logical.mesh
    sizes = dict(mesh.axes)
    copying = [o for o in node.owners if o.how == "replicate"]
    cutting = [o for o in copying if o.zero and sizes[o.axis] > 1]
    options = {(o.zero, *_paced(o)) for o in cutting}
    if len(options) > 1:
        raise AxisError(
            f"{node.name} is cut along {', '.join(o.axis for o in cutting)} in different ways",
            call=calls[cutting[-1].origin],
            legal="one replicate over all axes that state is cut along",
        )
    whole = [o for o in copying if o not in cutting and sizes[o.axis] > 1]
    first = (cutting or copying or [Owner("", "replicate", "reduce", node.origin)])[0]
    prefetch, reuse = _paced(first)
    experts = {o.axis for o in node.owners if o.how == "shard"}
    sizes_given = [o.bucket_size for o in copying if o.bucket_size is not None]
    return Keeping(
        over=_ordered(mesh.names, {o.axis for o in cutting}),
        copies=_ordered(mesh.names, {o.axis for o in whole}),
        split_over=_ordered(mesh.names, experts),
        zero=first.zero if cutting else 0,
        bucket_size=min(sizes_given, default=None),
        prefetch=prefetch,
        reuse=reuse,
        reduce_stream=first.stream,
        gather_stream=first.gather_stream or "gather",
        origin=first.origin,
    )


def _paced(owner: Owner) -> tuple[int, int]:
    """`prefetch` and `reuse`, which say nothing where parameters stay whole."""
    return (owner.prefetch, owner.reuse) if owner.zero == 3 else (1, 1)


def _ordered(names: tuple[str, ...], wanted: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in wanted)


def _local(spec: TensorSpec, parts: int) -> Value:
    """A parameter as one rank has it: its part of the experts."""
    shape = (spec.shape[0] // parts, *spec.shape[1:]) if parts > 1 else spec.shape
    return Value("", "param", shape, spec.dtype)


def _packed(local: Mapping[str, Value], names: list[str], keeping: Keeping) -> list[list[str]]:
    """In pieces of about the bucket's size; what one chunk gathers at once is one piece."""
    if keeping.zero > 1:
        return [names]
    limit = keeping.bucket_size or WHOLE_SIZE
    pieces: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = local[name].nbytes
        if pieces[-1] and filled + size > limit:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces


def _layout(
    name: str, local: Mapping[str, Value], params: list[str], like: _Parameter, parts: int
) -> Bucket:
    values = [local[param] for param in params]
    keeping = like.keeping
    step = max(1, ALIGNMENT // dtype_bytes(values[0].dtype))
    offsets, end = [], 0
    for value in values:
        offsets.append(end)
        end += math.ceil(math.prod(value.shape) / step) * step
    step *= parts
    return Bucket(
        name=name,
        params=tuple(params),
        shapes=tuple(value.shape for value in values),
        offsets=tuple(offsets),
        size=math.ceil(end / step) * step,
        dtype=values[0].dtype,
        zero=keeping.zero,
        slices=tuple(sorted(like.slices)),
        over=keeping.over,
        copies=keeping.copies,
        split_over=keeping.split_over,
    )
