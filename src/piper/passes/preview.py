"""preview: the complete logical graph in, the communication that each directive will cause out.

A dry run of the passes: one small function per kind of communication, none of which needs a body.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from piper.errors import Call
from piper.ir.byte_sizes import show_size
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.nodes import TRACED, Chunk, CommKind
from piper.ir.routing import expert_form
from piper.ir.values import Value, accumulation_dtype, dtype_bytes
from piper.mesh import Group, Slice
from piper.passes.buckets import Bucketed, make_buckets
from piper.passes.loss import STREAM
from piper.passes.transfers import message_stream
from piper.plan.body_spec import TensorSpec
from piper.plan.types import Bucket

Specs = Mapping[str, TensorSpec]  # traced Values at the size of one rank's microbatch
_GIVEN = ("param", "buffer", "batch", "key", "constant", "saved")


class Foreseen(msgspec.Struct, frozen=True):
    """Comms that directive `origin` will cause: how many nodes of which kinds, and what they do."""

    origin: int
    comms: tuple[tuple[CommKind, int], ...]
    text: str


def foresee(
    graph: Graph, specs: Specs, calls: Sequence[Call], *, data_axes: tuple[str, ...]
) -> list[Foreseen]:
    """All of it. Gathers of ZeRO 3 are at most so many: a backward may read no parameter."""
    return [
        *messages(graph, specs),
        *expert_exchanges(graph, specs),
        *gradient_reductions(graph, specs, calls),
        *loss_totals(graph, data_axes=data_axes),
    ]


def preview_text(found: Sequence[Foreseen], history: Sequence[Record]) -> str:
    """Per directive what it causes, in the order of the directives."""
    lines = []
    for origin, record in enumerate(history):
        mine = [f"    {item.text}" for item in found if item.origin == origin]
        if mine:
            lines += [f"{record}  ({record.call.source})" if record.call.source else f"{record}"]
            lines += mine
    rest = [f"    {item.text}" for item in found if item.origin == TRACED]
    lines += ["whatever the strategy", *rest] if rest else []
    causing = {item.origin for item in found}
    silent = [r.directive.kind for origin, r in enumerate(history) if origin not in causing]
    if silent:
        lines.append(f"no communication: {', '.join(_counted(silent))}")
    return "\n".join(lines) or "no communication"


def _counted(names: list[str]) -> list[str]:
    return [f"{n} {name}" if n > 1 else name for name, n in Counter(names).items()]


def messages(graph: Graph, specs: Specs) -> Iterator[Foreseen]:
    """send and recv of every Value that is read on another slice, once for all its readers there."""
    chunks = {chunk.name: chunk for chunk in graph.chunks}
    maker = {name: chunk for chunk in chunks.values() for name in chunk.outputs}
    seen: set[tuple[str, Slice]] = set()
    found: dict[tuple[int, str, Slice, Slice, str], list[str]] = defaultdict(list)
    for phase in ("F", "B"):
        for chunk in chunks.values():
            if (chunk.phase == "F") != (phase == "F"):
                continue
            for name, source in _arriving(graph, chunk, maker):
                assert source.slice is not None and chunk.slice is not None
                if source.slice != chunk.slice and (name, chunk.slice) not in seen:
                    seen.add((name, chunk.slice))
                    named = chunk.transfer or source.transfer
                    stream = message_stream(named, source.slice, chunk.slice)
                    what = _base(name)
                    found[chunk.origin, what, source.slice, chunk.slice, stream].append(name)
    for (origin, what, source_at, at, stream), names in found.items():
        size = show_size(_bytes(specs[what.removeprefix("gradient of ")]))
        often = "once per microbatch" if len(names) == graph.num_microbatches else _times(names)
        text = f"send/recv of {what} ({size}) {source_at} -> {at} on stream {stream}, {often}"
        yield Foreseen(origin, (("send", len(names)), ("recv", len(names))), text)


def _arriving(
    graph: Graph, chunk: Chunk, maker: Mapping[str, Chunk]
) -> Iterator[tuple[str, Chunk]]:
    """What a chunk reads of other chunks, and who makes it; gradients are added before they travel."""
    sums: dict[tuple[str, Slice | None], list[str]] = defaultdict(list)
    for name in chunk.inputs:
        value = graph.values[name]
        if value.role == "grad":
            sums[value.of, maker[name].slice].append(name)
        elif value.role not in _GIVEN:
            yield name, maker[name]
    for (of, _), names in sums.items():
        yield names[0] if len(names) == 1 else f"$d.{of}", maker[names[0]]


def _base(name: str) -> str:
    """`%x[MB=0]` -> `%x`, `$d.%x/3[MB=0]` -> `gradient of %x`."""
    plain = name.partition("[")[0]
    if plain.startswith("$d."):
        return f"gradient of {plain.removeprefix('$d.').rpartition('/')[0] or plain[3:]}"
    return plain


def _times(names: Sequence[str]) -> str:
    return "once" if len(names) == 1 else f"{len(names)} times"


@dataclass
class _Exchanges:
    """The all_to_alls of regions that look alike."""

    regions: set[int] = field(default_factory=set)
    forward: int = 0
    backward: int = 0
    rows: dict[str, int] = field(default_factory=dict)  # what travels -> its bytes


def expert_exchanges(graph: Graph, specs: Specs) -> Iterator[Foreseen]:
    """all_to_alls around sharded chunks: counts and rows there and back, gradients likewise."""
    found: dict[tuple[int, Slice, tuple[str, ...], str], _Exchanges] = defaultdict(_Exchanges)
    for chunk in graph.chunks:
        owners = [owner for owner in chunk.owners if owner.how == "shard"]
        axes = tuple(owner.axis for owner in owners)
        if graph.mesh.size_of(axes) == 1:
            continue
        assert chunk.slice is not None
        mine = found[owners[0].origin, chunk.slice, axes, owners[0].stream]
        mine.regions.add(chunk.chunk)
        if chunk.phase == "BW":
            continue
        if chunk.phase == "F":
            mine.forward += _forward_exchanges(graph, specs, chunk, mine.rows)
        else:
            mine.backward += _backward_exchanges(graph, specs, chunk, mine.rows)
    for (origin, at, axes, stream), mine in found.items():
        regions = len(mine.regions)
        per = f"{regions} region{'s' * (regions > 1)} x {graph.num_microbatches} microbatches"
        sizes = ", ".join(f"{what} {show_size(size)}" for what, size in mine.rows.items())
        text = (
            f"all_to_all over {','.join(axes)} at {at} on stream {stream}: {mine.forward} forward "
            f"and {mine.backward} backward for {per}; in each microbatch {sizes}"
        )
        yield Foreseen(origin, (("all_to_all", mine.forward + mine.backward),), text)


def _forward_exchanges(graph: Graph, specs: Specs, chunk: Chunk, rows: dict[str, int]) -> int:
    form, _ = expert_form(graph, chunk)
    assert form is not None
    outputs = [name for name in chunk.outputs if graph.values[name].role != "saved"]
    first = not graph.microbatch(chunk)
    if first:
        there = sum(_bytes(specs[_base(chunk.inputs[i])]) for i in form.rows)
        _count(rows, "counts", _bytes(specs[_base(chunk.inputs[form.counts])]))
        _count(rows, "rows there", there)
        _count(rows, "rows back", sum(_bytes(specs[_base(name)]) for name in outputs))
    return 1 + len(form.rows) + len(outputs)


def _backward_exchanges(graph: Graph, specs: Specs, chunk: Chunk, rows: dict[str, int]) -> int:
    forward = graph.nodes[chunk.forward]
    assert isinstance(forward, Chunk)
    form, _ = expert_form(graph, forward)
    assert form is not None
    values = [graph.values[name] for name in chunk.inputs]
    tangents = list(dict.fromkeys(value.of for value in values if value.role == "grad"))
    wanted = {forward.inputs[i] for i in form.rows}
    back = [name for name in chunk.outputs if graph.values[name].of in wanted]
    if not graph.microbatch(chunk):
        there = sum(_bytes(specs[_base(name)]) for name in tangents)
        _count(rows, "gradients there", there)
        of = [_base(graph.values[name].of) for name in back]
        _count(rows, "gradients back", sum(_bytes(specs[name]) for name in of))
    return len(tangents) + len(back)


def _count(rows: dict[str, int], what: str, size: int) -> None:
    rows[what] = rows.get(what, 0) + size


def gradient_reductions(graph: Graph, specs: Specs, calls: Sequence[Call]) -> Iterator[Foreseen]:
    """What becomes of each bucket's gradients and, where it is cut into shards, of its parameters."""
    bucketed = make_buckets(graph, specs, calls)
    found: dict[tuple[int, CommKind, str, str, str], list[tuple[int, int]]] = defaultdict(list)
    for number, bucket in enumerate(bucketed.buckets):
        keeping = bucketed.keeping[number]
        for kind, how_often, group, dtype in _bucket_comms(graph, bucketed, number):
            size = bucket.size * dtype_bytes(dtype)
            stream = keeping.gather_stream if kind == "all_gather" else keeping.reduce_stream
            where = _group(group.slices, group.over)
            found[keeping.origin, kind, where, stream, dtype].append((how_often, size))
    for (origin, kind, where, stream, _), items in found.items():
        total = sum(often for often, _ in items)
        what = "gradients" if kind != "all_gather" else "parameters"
        largest = show_size(max(size for _, size in items))
        text = (
            f"{kind} of {what}, {total} in {len(items)} buckets of up to {largest}, "
            f"over {where} on stream {stream}"
        )
        yield Foreseen(origin, ((kind, total),), text)


def _bucket_comms(
    graph: Graph, bucketed: Bucketed, number: int
) -> Iterator[tuple[CommKind, int, Group, str]]:
    """Kind, how many nodes, group and dtype of what a bucket causes."""
    bucket = bucketed.buckets[number]
    wide = accumulation_dtype(bucket.dtype)
    copies = Group(bucket.slices, bucket.copies)
    if copies.size(graph.mesh) > 1 and bucket.trained:
        yield "all_reduce", len(bucket.slices), copies, wide
    if not bucket.zero:
        return
    uses, rounds = _uses(graph, bucket, bucketed.keeping[number].reuse)
    for at in bucket.slices:
        group = Group((at,), bucket.over)
        scatters = 1 if bucket.zero == 1 else rounds[at]
        if bucket.trained:
            yield "reduce_scatter", scatters, group, wide
        yield "all_gather", uses[at] if bucket.zero == 3 else 1, group, bucket.dtype


def _uses(graph: Graph, bucket: Bucket, reuse: int) -> tuple[Counter[Slice], Counter[Slice]]:
    """Per slice: gathers if every chunk but BW reads its parameters, and microbatches that train."""
    uses: Counter[Slice] = Counter()
    training: set[tuple[Slice, int]] = set()
    params = set(bucket.params)
    for chunk in graph.chunks:
        assert chunk.slice is not None
        forward = graph.nodes[chunk.forward] if chunk.forward else chunk
        if not params.isdisjoint(forward.inputs) and chunk.phase != "BW":
            uses[chunk.slice] += 1
        if any(graph.values[name].of in params for name in chunk.outputs):
            training.add((chunk.slice, graph.microbatch(chunk)))
    gathers = Counter({at: -(-count // reuse) for at, count in uses.items()})
    return gathers, Counter(at for at, _ in training)


def loss_totals(graph: Graph, *, data_axes: tuple[str, ...]) -> Iterator[Foreseen]:
    """The sum of the loss, and of its count if there is one, on every rank."""
    slices = tuple(sorted({chunk.slice or Slice() for chunk in graph.chunks}))
    if Group(slices, data_axes).size(graph.mesh) == 1:
        return
    for what in ("loss", "count") if graph.count else ("loss",):
        text = f"all_reduce of the {what} over {_group(slices, data_axes)} on stream {STREAM}, once"
        yield Foreseen(TRACED, (("all_reduce", len(slices)),), text)


def _group(slices: Sequence[Slice], over: Sequence[str]) -> str:
    along = ",".join(over)
    if len(slices) == 1:
        return f"{along} at {slices[0]}"
    return f"{'|'.join(map(str, slices))}" + (f" and {along}" if along else "")


def _bytes(spec: TensorSpec) -> int:
    return Value("", "activation", spec.shape, spec.dtype).nbytes
