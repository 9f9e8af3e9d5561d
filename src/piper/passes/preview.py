"""preview: the complete logical graph in, the communication that each directive will cause out.

It is lowering without bodies: what every chunk reads and writes is taken from the graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from piper.ir.form.byte_sizes import show_size
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.nodes import TRACED, Comm, CommKind
from piper.mesh import Slice

_GRADIENTS = ("grad", "sum")  # roles of what backwards pass on


class Foreseen(msgspec.Struct, frozen=True):
    """Comms that directive `origin` will cause: how many nodes of which kinds, and what they do."""

    origin: int
    comms: tuple[tuple[CommKind, int], ...]
    text: str


def preview_text(foreseen: Sequence[Foreseen], history: Sequence[Record]) -> str:
    """Per directive what it causes, in the order of the directives."""
    lines = []
    for origin, record in enumerate(history):
        mine = [f"    {item.text}" for item in foreseen if item.origin == origin]
        if mine:
            lines += [f"{record}  ({record.call.source})" if record.call.source else f"{record}"]
            lines += mine
    rest = [f"    {item.text}" for item in foreseen if item.origin == TRACED]
    lines += ["whatever the strategy", *rest] if rest else []
    causing = {item.origin for item in foreseen}
    silent = [r.directive.kind for origin, r in enumerate(history) if origin not in causing]
    if silent:
        lines.append(f"no communication: {', '.join(_counted(silent))}")
    return "\n".join(lines) or "no communication"


def _counted(names: list[str]) -> list[str]:
    return [f"{n} {name}" if n > 1 else name for name, n in Counter(names).items()]


def foreseen_in(graph: Graph) -> list[Foreseen]:
    """What the Comms of a physical graph are, in words, alike ones together."""
    by_way: dict[tuple[object, ...], list[Comm]] = defaultdict(list)
    for comm in graph.comms:
        by_way[_way(graph, comm)].append(comm)
    kinds = {"send": _messages, "all_to_all": _exchanges}
    items = []
    for comms in by_way.values():
        describe = kinds.get(comms[0].comm, _reductions)
        if _serves_tensors(graph, comms[0]):
            describe = _changes
        if comms[0].comm != "recv":
            items.append(describe(graph, comms))
    return sorted(items, key=lambda item: item.origin)


def _way(graph: Graph, comm: Comm) -> tuple[object, ...]:
    """Comms that are told in one line."""
    value = graph.values[comm.inputs[0]]
    same = (comm.origin, comm.comm, comm.stream)
    if comm.comm in ("send", "recv"):
        return (*same, comm.group, _base(value.name))
    if _serves_tensors(graph, comm):
        return (*same, comm.group, value.role in _GRADIENTS)
    if comm.comm == "all_to_all":
        return (*same, comm.group)
    return (*same, comm.group, value.dtype, _what(graph, comm))


def _serves_tensors(graph: Graph, comm: Comm) -> bool:
    """Whether it leads from one layout to another along an axis that shares tensors."""
    return bool({axis for axis, _ in graph.values[comm.inputs[0]].cut} & {*comm.group.over})


def _changes(graph: Graph, comms: list[Comm]) -> Foreseen:
    """Changes of layout between pieces of code that is cut over ranks."""
    first = comms[0]
    what = "gradients of activations" if _is_gradient(graph, first) else "activations"
    each = len(comms) // graph.num_microbatches
    largest = max(
        graph.values[v].nbytes for comm in comms for v in (comm.inputs[0], comm.outputs[0])
    )
    text = (
        f"{first.comm} of {what} over {_group(first.group.slices, first.group.over)} on stream "
        f"{first.stream}: {each} in each microbatch, of up to {show_size(largest)}"
    )
    return Foreseen(first.origin, ((first.comm, len(comms)),), text)


def _is_gradient(graph: Graph, comm: Comm) -> bool:
    return graph.values[comm.inputs[0]].role in _GRADIENTS


def _messages(graph: Graph, comms: list[Comm]) -> Foreseen:
    value = graph.values[comms[0].inputs[0]]
    source, target = comms[0].group.slices
    number = len(comms)
    often = "once per microbatch" if number == graph.num_microbatches else _times(number)
    text = (
        f"send/recv of {_base(value.name)} ({show_size(value.nbytes)}) {source} -> {target} "
        f"on stream {comms[0].stream}, {often}"
    )
    return Foreseen(comms[0].origin, (("send", number), ("recv", number)), text)


def _base(name: str) -> str:
    """`%x[MB=0]` -> `%x`, `$d.%x/3[MB=0]` -> `gradient of %x`."""
    plain = name.partition("[")[0].partition("@")[0]
    if plain.startswith("$d."):
        return f"gradient of {plain.removeprefix('$d.').rpartition('/')[0] or plain[3:]}"
    return plain


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _exchanges(graph: Graph, comms: list[Comm]) -> Foreseen:
    """all_to_alls around sharded chunks: counts and rows there and back, gradients likewise."""
    sizes: dict[str, int] = defaultdict(int)
    backward = regions = 0
    for comm in comms:
        value = graph.values[comm.inputs[0]]
        gradient = _is_gradient(graph, comm)
        backward += gradient
        counts = len(comm.inputs) == 1
        regions += counts and not graph.microbatch(comm)
        way = "back" if comm.reverse else "there"
        what = "counts" if counts else f"{'gradients' if gradient else 'rows'} {way}"
        if not graph.microbatch(comm):
            sizes[what] += value.nbytes
    order = ("counts", "rows there", "rows back", "gradients there", "gradients back")
    each = ", ".join(f"{what} {show_size(sizes[what])}" for what in order if what in sizes)
    group = comms[0].group
    text = (
        f"all_to_all over {_group(group.slices, group.over)} on stream {comms[0].stream}: "
        f"{len(comms) - backward} forward and {backward} backward for "
        f"{regions} region{'s' * (regions > 1)} x {graph.num_microbatches} microbatches; "
        f"in each microbatch {each}"
    )
    return Foreseen(comms[0].origin, (("all_to_all", len(comms)),), text)


def _reductions(graph: Graph, comms: list[Comm]) -> Foreseen:
    """What becomes of gradients and, where they are cut into shards, of parameters; of loss and norm."""
    first = comms[0]
    what = _what(graph, first)
    where = f"over {_group(first.group.slices, first.group.over)} on stream {first.stream}"
    if what in ("gradients", "parameters"):
        sizes = [
            max(graph.values[v].nbytes for v in (*comm.inputs, comm.outputs[0])) for comm in comms
        ]
        buckets = len({graph.values[comm.inputs[0]].bucket for comm in comms})
        largest = show_size(max(sizes))
        text = (
            f"{first.comm} of {what}, {len(comms)} in {buckets} buckets of up to {largest}, {where}"
        )
    else:
        text = f"{first.comm} of the {what} {where}, once"
    return Foreseen(first.origin, ((first.comm, len(comms)),), text)


def _what(graph: Graph, comm: Comm) -> str:
    """What a collective of scalars or of buckets is about."""
    if graph.values[comm.inputs[0]].bucket >= 0:
        return "parameters" if comm.comm == "all_gather" else "gradients"
    return graph.values[comm.outputs[0]].name.partition("@")[0].removeprefix("$")


def _group(slices: Sequence[Slice], over: Sequence[str]) -> str:
    along = ",".join(over)
    if len(slices) == 1:
        at = str(slices[0])
        return along if at == "*" else f"{along} at {at}"  # of all ranks there is nothing to say
    return f"{'|'.join(map(str, slices))}" + (f" and {along}" if along else "")
