"""preview: the complete logical graph in, the communication that each directive will cause out.

A dry run of the passes: one small function per kind of communication, none of which needs a body.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.nodes import TRACED, Chunk, CommKind
from piper.ir.routing import expert_form
from piper.ir.values import Value, accumulation_dtype
from piper.mesh import Group, Slice
from piper.passes.loss import STREAM
from piper.plan.body_spec import TensorSpec
from piper.plan.summary import show_bytes

Specs = Mapping[str, TensorSpec]  # traced Values at the size of one rank's microbatch
_GIVEN = ("param", "buffer", "batch", "constant", "saved")


class Foreseen(msgspec.Struct, frozen=True):
    """Comms that directive `origin` will cause: how many nodes of which kinds, and what they do."""

    origin: int
    comms: tuple[tuple[CommKind, int], ...]
    text: str


def foresee(graph: Graph, specs: Specs, *, data_axes: tuple[str, ...]) -> list[Foreseen]:
    return [
        *messages(graph, specs),
        *expert_exchanges(graph, specs),
        *gradient_reductions(graph, specs),
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
    silent = [r.call.name for origin, r in enumerate(history) if origin not in causing]
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
                    stream = chunk.transfer or source.transfer or f"{source.slice}>{chunk.slice}"
                    what = _base(name)
                    found[chunk.origin, what, source.slice, chunk.slice, stream].append(name)
    for (origin, what, source_at, at, stream), names in found.items():
        size = show_bytes(_bytes(specs[what.removeprefix("gradient of ")]))
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
        if chunk.phase == "F":
            mine.forward += _forward_exchanges(graph, specs, chunk, mine.rows)
        else:
            mine.backward += _backward_exchanges(graph, specs, chunk, mine.rows)
    for (origin, at, axes, stream), mine in found.items():
        regions = len(mine.regions)
        per = f"{regions} region{'s' * (regions > 1)} x {graph.num_microbatches} microbatches"
        sizes = ", ".join(f"{what} {show_bytes(size)}" for what, size in mine.rows.items())
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


@dataclass
class _Reduced:
    """A parameter: where it lives, along which axes its gradient is partial, who asked for that."""

    slices: set[Slice] = field(default_factory=set)
    over: tuple[str, ...] = ()
    stream: str = ""
    origin: int = TRACED
    trained: bool = False


def gradient_reductions(graph: Graph, specs: Specs) -> Iterator[Foreseen]:
    """One all_reduce for all parameters with the same copies and the same directive."""
    bundles: dict[tuple[tuple[Slice, ...], tuple[str, ...], str, int], list[str]] = defaultdict(
        list
    )
    for name, param in _parameters(graph).items():
        if param.trained:
            slices = tuple(sorted(param.slices))
            bundles[slices, param.over, param.stream, param.origin].append(name)
    for (slices, over, stream, origin), names in bundles.items():
        if Group(slices, over).size(graph.mesh) > 1:
            size = sum(_gradient_bytes(graph, specs, name) for name in names)
            what = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
            text = (
                f"all_reduce of the gradients of {what} ({show_bytes(size)}) over "
                f"{_group(slices, over)} on stream {stream}, once"
            )
            yield Foreseen(origin, (("all_reduce", len(slices)),), text)


def _parameters(graph: Graph) -> dict[str, _Reduced]:
    found: dict[str, _Reduced] = defaultdict(_Reduced)
    for chunk in graph.chunks:
        assert chunk.slice is not None
        for name in (*chunk.inputs, *chunk.outputs):
            value = graph.values[name]
            if value.role not in ("param", "param_grad"):
                continue
            param = found[value.of if value.role == "param_grad" else name]
            param.slices.add(chunk.slice)
            partial = [owner for owner in chunk.owners if owner.how == "replicate"]
            axes = {owner.axis for owner in partial if graph.mesh.size_of((owner.axis,)) > 1}
            param.over = tuple(axis for axis in graph.mesh.names if axis in axes)
            param.stream = partial[0].stream if partial else "reduce"
            param.origin = partial[0].origin if partial else chunk.origin
            param.trained |= value.role == "param_grad"
    return found


def _gradient_bytes(graph: Graph, specs: Specs, name: str) -> int:
    spec = specs[name]
    split = tuple(axis for axis, layout in graph.values[name].layout if layout == "split(0)")
    dtype = accumulation_dtype(spec.dtype)
    return _bytes(TensorSpec(spec.shape, dtype)) // graph.mesh.size_of(split)


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
