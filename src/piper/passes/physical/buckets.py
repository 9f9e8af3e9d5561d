"""buckets: which parameters are reduced, updated and gathered together, and how they lie in memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

import msgspec

from piper.errors import AxisError, Call, PlanError
from piper.ir.graph import Graph
from piper.ir.layouts import PARTIAL, REPLICATED, Layouts, Split, layouts_text, local
from piper.ir.nodes import ONCE, Chunk, Owner
from piper.ir.precisions import Dtypes, Precision, dtypes_problem
from piper.ir.tensor_type import TensorType, accumulation_dtype, dtype_bytes
from piper.ir.values import Value
from piper.mesh import Slice
from piper.passes.physical.draft import lane
from piper.plan.cadence import Cadence
from piper.plan.optimizers import Grouping
from piper.plan.types import Bucket

WIDE_ENOUGH = Precision()
ALIGNMENT = 16  # bytes; kernels load parameters in words of this size
WHOLE_SIZE = 25 << 20  # bytes of a bucket whose parameters stay whole, unless the user says
TINY = 16  # what is smaller than one part in so many of a bucket goes with the next large parameter


@dataclass(frozen=True)
class Keeping:
    """How a parameter is kept: along which axes it is cut into shards and copied, and how it is laid out
    where its code is split. Along `same` ranks have copies, too, and compute the same gradient."""

    over: tuple[str, ...]
    copies: tuple[str, ...]
    same: tuple[str, ...]
    split: Layouts
    axes: tuple[str, ...]  # all of them, also those of one rank
    zero: int
    bucket_size: int | None
    prefetch: int
    reduce_every: int  # microbatches, or ONCE a step
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
    """All buckets, how each is kept, and where to find a parameter; and the `cadences` that were chosen
    for what directives leave open."""

    buckets: tuple[Bucket, ...]
    keeping: tuple[Keeping, ...]
    of: dict[str, int]
    cadences: tuple[Cadence, ...] = ()

    def trains(self, param: str) -> bool:
        return param in self.of and self.buckets[self.of[param]].trained

    def offset(self, param: str) -> int:
        bucket = self.buckets[self.of[param]]
        return bucket.offsets[bucket.params.index(param)]


def make_buckets(
    logical: Graph,
    calls: Sequence[Call],
    grouping: Grouping | None = None,
    precision: Precision = WIDE_ENOUGH,
    cadences: tuple[Cadence, ...] = (),
    lanes: int = 1,
) -> Bucketed:
    """Buckets of all parameters that get a gradient, and of those that are gathered for their use.

    A bucket holds parameters that live on the same slices and are kept alike, in the same dtypes. Where
    each use of them matters (ZeRO 2 and 3) the same chunks read all of it; else its size decides. Those
    of one parameter group (none: all are in one) lie side by side in it. `cadences` has what directives
    left open. Buckets take turns on `lanes` streams, where no directive names one.
    """
    params = _parameters(logical, calls, {cadence.origin: cadence for cadence in cadences})
    param_groups = grouping.of if grouping else {}
    held = {
        name: local(logical.values[name].type, logical.values[name].layout, logical.mesh)
        for name in params
    }
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    dtypes: dict[str, Dtypes] = {}
    for name, param in params.items():
        if param.trained or param.keeping.zero == 3:
            near = frozenset(param.users if param.keeping.zero > 1 else param.stages)
            dtypes[name] = _dtypes(name, held[name].dtype, param.trained, grouping, precision)
            alike = (param.keeping, param.trained, held[name].dtype, dtypes[name])
            key = (frozenset(param.slices), near, *alike)
            groups[key].append(name)
    buckets: list[Bucket] = []
    keeping: list[Keeping] = []
    of: dict[str, int] = {}
    turns: Counter[tuple[object, ...]] = Counter()  # of buckets that the same ranks talk about
    for names in groups.values():
        for part in _packed(held, names, params[names[0]].keeping):
            part.sort(key=lambda name: param_groups.get(name, 0))
            of |= dict.fromkeys(part, len(buckets))
            like = params[part[0]]
            talking = (frozenset(like.slices), like.keeping.over, like.keeping.copies)
            keeping.append(_on_lane(logical, like.keeping, turns[talking] % lanes))
            turns[talking] += 1
            parts = logical.mesh.size_of(keeping[-1].over)
            bucket = _layout(f"b{len(buckets)}", held, part, like, parts, dtypes[part[0]])
            if bucket.trained and any(param_groups.get(name) for name in part):
                groups_of = tuple(param_groups[name] for name in part)
                bucket = msgspec.structs.replace(bucket, param_groups=groups_of)
            buckets.append(bucket)
    for number in (number for cadence in cadences for number in cadence.kept):
        keeping[number] = replace(keeping[number], reuse=ONCE)
    return Bucketed(tuple(buckets), tuple(keeping), of, cadences)


def _on_lane(graph: Graph, keeping: Keeping, number: int) -> Keeping:
    """With the streams of that lane."""
    return replace(
        keeping,
        reduce_stream=lane(graph, keeping.reduce_stream, number),
        gather_stream=lane(graph, keeping.gather_stream, number),
    )


def _dtypes(
    name: str, dtype: str, trained: bool, grouping: Grouping | None, precision: Precision
) -> Dtypes:
    """What is kept for a parameter, and how its gradient is summed."""
    names: tuple[str, ...] = ()
    if trained and grouping is not None:
        number = grouping.of.get(name, 0)
        names = grouping.groups[number].names(number)
    dtypes = precision.dtypes(dtype, names)
    problem = dtypes_problem(dtype, dtypes) if trained else ""
    if problem:
        legal = " or ".join(dict.fromkeys((dtype, accumulation_dtype(dtype))))
        raise PlanError(f"{name} {problem}", legal=f"masters of {legal}")
    return dtypes


def _parameters(
    logical: Graph, calls: Sequence[Call], cadences: Mapping[int, Cadence]
) -> dict[str, _Parameter]:
    found: dict[str, _Parameter] = {}
    keepings: dict[tuple[tuple[Owner, ...], Layouts, frozenset[str]], Keeping] = {}
    alike = _alike(logical, calls)
    for node in logical.chunks:
        for name in (*node.inputs, *node.outputs):
            value = logical.values[logical.sources.get(name, name)]  # maybe in another layout
            if value.role not in ("param", "param_grad"):
                continue
            param = value.of if value.role == "param_grad" else value.name
            way = (node.owners, logical.values[param].layout, alike.get(param, frozenset()))
            if way not in keepings:
                keepings[way] = _keeping(logical, node, way[1], way[2], calls, cadences)
            known = found.setdefault(param, _Parameter(keepings[way]))
            _check_alike(param, known.keeping, keepings[way], calls)
            _check_gradient(logical, value, keepings[way])
            assert node.slice is not None
            known.slices.add(node.slice)
            known.users.add(node.chunk)
            known.stages.add(node.tags[0] if node.tags else None)
            known.trained |= value.role == "param_grad"
    return found


def check_gathers(logical: Graph, bucketed: Bucketed, calls: Sequence[Call]) -> None:
    """Raise where ZeRO 3 would have to gather a parameter for communication that puts its parts
    together, as for code without a gradient that reads it whole: gathers are for chunks."""
    read = ((node, name) for node in logical.chunks for name in node.inputs)
    for node, name in read:
        source = logical.values[logical.sources.get(name, name)]
        if source.name == name or source.name not in bucketed.of:
            continue
        keeping = bucketed.keeping[bucketed.of[source.name]]
        if keeping.zero == 3:
            made = (logical.values[output] for output in node.outputs)
            metrics = ", ".join(unquote(value.of) for value in made if value.role == "metric")
            making = f", which makes metrics ({metrics})," if metrics else ""
            axes = ", ".join(axis for axis, _ in keeping.split)
            raise AxisError(
                f"{node.name}{making} reads {source.name} whole and gives it no gradient, but ZeRO 3 "
                f"cuts what is cut along {axes} already",
                call=calls[keeping.origin] if keeping.origin >= 0 else None,
                legal="zero=2; or what is computed of run.parameters() between steps",
            )


def _alike(logical: Graph, calls: Sequence[Call]) -> dict[str, frozenset[str]]:
    """Per parameter, the axes that share tensors along which all ranks compute the same gradient."""
    whole: dict[str, set[str]] = {}
    partial: dict[str, set[str]] = defaultdict(set)
    equal: dict[str, set[str]] = defaultdict(set)
    for value in logical.values.values():
        if value.role == "param" and value.cut:
            whole[value.name] = {axis for axis, way in value.cut if way == REPLICATED}
        elif value.role == "param_grad":
            partial[value.of] |= {axis for axis, way in value.cut if way == PARTIAL}
            equal[value.of] |= {axis for axis, way in value.cut if way == REPLICATED}
    for param in whole:
        if mixed := partial[param] & equal[param]:
            raise AxisError(
                f"{param} is read along {', '.join(sorted(mixed))} by code that is equal on all ranks "
                "and by code that differs",
                call=_cutting(logical, mixed, calls),
                legal="parameters that only one kind of code reads",
            )
    return {param: frozenset(axes - partial[param]) for param, axes in whole.items()}


def _cutting(logical: Graph, axes: set[str], calls: Sequence[Call]) -> Call | None:
    """The first directive that shares tensors along one of some axes."""
    owners = (owner for node in logical.chunks for owner in node.owners)
    return next((calls[o.origin] for o in owners if o.axis in axes and o.origin >= 0), None)


def _check_gradient(logical: Graph, value: Value, keeping: Keeping) -> None:
    """A gradient is partial along just the axes over which it is going to be summed."""
    if value.role != "param_grad":
        return
    sizes = dict(logical.mesh.axes)
    partial = {axis for axis, way in value.layout if way == PARTIAL and sizes[axis] > 1}
    split = tuple((axis, way) for axis, way in value.layout if isinstance(way, Split))
    if partial != {*keeping.over, *keeping.copies} or split != keeping.split:
        raise PlanError(
            f"{value.name} is {layouts_text(value.layout)}, but {value.of} is kept "
            f"over {', '.join((*keeping.over, *keeping.copies)) or '(nothing)'}"
        )


def _check_alike(param: str, one: Keeping, other: Keeping, calls: Sequence[Call]) -> None:
    ways = [
        (k.over, k.copies, k.same, k.zero, k.reduce_every, k.reuse, k.prefetch)
        for k in (one, other)
    ]
    if ways[0] != ways[1]:
        raise AxisError(
            f"{param} is kept in two ways by the regions that read it",
            call=calls[other.origin] if other.origin >= 0 else None,
            details=[f"zero={k.zero} over {', '.join(k.over + k.copies)}" for k in (one, other)],
            legal="the same replicate for all regions that share a parameter",
        )


def _keeping(
    logical: Graph,
    node: Chunk,
    layout: Layouts,
    alike: frozenset[str],
    calls: Sequence[Call],
    cadences: Mapping[int, Cadence],
) -> Keeping:
    """How a parameter of this layout is kept by the owners of a chunk that reads it: it has copies along
    axes where it is replicated, and gradients to sum but along those in `alike`."""
    mesh = logical.mesh
    sizes = dict(mesh.axes)
    whole_along = {axis for axis, way in layout if way == REPLICATED} - alike
    copying = [o for o in node.owners if o.axis in whole_along]
    cutting = [o for o in copying if o.zero and sizes[o.axis] > 1]
    options = {(o.zero, *_paced(o, cadences)) for o in cutting}
    if len(options) > 1:
        raise AxisError(
            f"{node.name} is cut along {', '.join(o.axis for o in cutting)} in different ways",
            call=calls[cutting[-1].origin],
            legal="one replicate over all axes that state is cut along",
        )
    whole = [o for o in copying if o not in cutting and sizes[o.axis] > 1]
    first = (cutting or copying or [Owner("", "", "batch", "reduce", node.origin)])[0]
    prefetch, reduce_every, reuse = _paced(first, cadences) if cutting else (1, ONCE, 1)
    sizes_given = [o.bucket_size for o in copying if o.bucket_size is not None]
    return Keeping(
        over=_ordered(mesh.names, {o.axis for o in cutting}),
        copies=_ordered(mesh.names, {o.axis for o in whole}),
        same=_ordered(mesh.names, {axis for axis in alike if sizes[axis] > 1}),
        split=tuple((axis, way) for axis, way in layout if isinstance(way, Split)),
        axes=tuple(axis for axis, _ in layout),
        zero=first.zero if cutting else 0,
        bucket_size=min(sizes_given, default=None),
        prefetch=prefetch,
        reduce_every=reduce_every,
        reuse=reuse,
        reduce_stream=first.stream,
        gather_stream=first.gather_stream or "gather",
        origin=first.origin,
    )


def _paced(owner: Owner, cadences: Mapping[int, Cadence]) -> tuple[int, int, int]:
    """`prefetch`, which says nothing where parameters stay whole, `reduce_every` and `reuse`."""
    chosen = cadences.get(owner.origin)
    reduce_every, reuse = owner.reduce_every, owner.reuse
    if reduce_every is None:
        reduce_every = chosen.reduce_every if chosen else ONCE
    if reuse is None:
        reuse = chosen.reuse if chosen else 1
    assert reduce_every is not None and reuse is not None, "a choice for what is open"
    return owner.prefetch if owner.zero == 3 else 1, reduce_every, reuse


def _ordered(names: tuple[str, ...], wanted: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in wanted)


def _packed(held: Mapping[str, TensorType], names: list[str], keeping: Keeping) -> list[list[str]]:
    """In pieces of about the bucket's size; what one chunk gathers at once is one piece. What is tiny
    goes with the next large parameter, as a norm with a matrix: alone it would be mostly latency."""
    if keeping.zero > 1:
        return [names]
    limit = keeping.bucket_size or WHOLE_SIZE
    pieces: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = held[name].nbytes
        goes_with = filled * TINY < limit <= size
        if pieces[-1] and filled + size > limit and not goes_with:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces


def _layout(
    name: str,
    held: Mapping[str, TensorType],
    params: list[str],
    like: _Parameter,
    parts: int,
    dtypes: Dtypes,
) -> Bucket:
    types = [held[param] for param in params]
    keeping = like.keeping
    step = max(1, ALIGNMENT // dtype_bytes(types[0].dtype))
    offsets, end = [], 0
    for type in types:
        offsets.append(end)
        end += math.ceil(type.size / step) * step
    step *= parts
    return Bucket(
        name=name,
        params=tuple(params),
        shapes=tuple(type.shape for type in types),
        offsets=tuple(offsets),
        size=math.ceil(end / step) * step,
        dtype=types[0].dtype,
        master=dtypes.master,
        sums=dtypes.sums,
        wire=dtypes.wire,
        state=dtypes.state,
        slices=tuple(sorted(like.slices)),
        over=keeping.over,
        copies=keeping.copies,
        same=keeping.same,
        trained=like.trained,
    )
