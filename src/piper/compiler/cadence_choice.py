"""Cadences: what directives leave open about reducing and gathering, chosen by bytes and by memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from piper.ir.form.byte_sizes import show_size
from piper.ir.graph import Graph
from piper.ir.nodes import ONCE
from piper.ir.precisions import Precision
from piper.ir.tensor_type import dtype_bytes
from piper.plan.cadence import Cadence

_REDUCE = (ONCE, 1)  # what lies between takes as much memory as ONCE, and moves more
_REUSE = (ONCE, 4, 2, 1)
_UNBOUND = (
    "no memory limit was given: sums are held, which moves {moved} a step instead of {each}",
    "no memory limit was given",
)


@dataclass(frozen=True)
class _Open:
    """What a directive leaves open, and the bytes that it is about."""

    origin: int
    reduces: bool
    gathers: bool
    grad_bytes: int  # that one reduction of all its gradients brings
    param_bytes: int


def cadences_of(
    graph: Graph, precision: Precision, limit: int | None
) -> Iterator[tuple[Cadence, ...]]:
    """Choices for all that the directives of a complete logical graph leave open: without a limit one;
    else all of them, those that move the fewest bytes first, for the caller to see which one fits."""
    found = _open_in(graph, precision)
    if not found or limit is None:
        yield tuple(_unbound(each, graph.num_microbatches) for each in found)
        return
    ways = sorted(
        product(_REDUCE, _REUSE),
        key=lambda way: sum(_moved(each, graph.num_microbatches, *way) for each in found),
    )
    reason = f"of what fits into {show_size(limit)} it moves the fewest bytes"
    yield from dict.fromkeys(tuple(_cadence(e, *way, reason) for e in found) for way in ways)


def _open_in(graph: Graph, precision: Precision) -> list[_Open]:
    reduces: dict[int, bool] = {}
    gathers: dict[int, bool] = {}
    params: dict[int, set[str]] = {}
    sizes = dict(graph.mesh.axes)
    for node in graph.chunks:
        for owner in node.owners if node.phase == "F" else ():
            if sizes[owner.axis] > 1 and None in (owner.reduce_every, owner.reuse):
                reduces[owner.origin] = owner.reduce_every is None
                gathers[owner.origin] = owner.reuse is None
                read = (name for name in node.inputs if graph.values[name].role == "param")
                params.setdefault(owner.origin, set()).update(read)
    found = []
    for origin, names in params.items():
        types = [graph.values[name].type for name in names]
        grads = sum(t.size * dtype_bytes(precision.dtypes(t.dtype).wire) for t in types)
        held = sum(type.nbytes for type in types)
        found.append(_Open(origin, reduces[origin], gathers[origin], grads, held))
    return found


def _moved(each: _Open, microbatches: int, reduce_every: int, reuse: int) -> int:
    """Bytes a step, of each rank's link alike; each microbatch uses parameters twice."""
    reductions = ceil(microbatches / reduce_every) if reduce_every else 1
    uses = ceil(2 * microbatches / reuse) if reuse else 1
    return each.reduces * each.grad_bytes * reductions + each.gathers * each.param_bytes * uses


def _unbound(each: _Open, microbatches: int) -> Cadence:
    """Gradients that are reduced once move fewest bytes; that parameters are not held is what ZeRO 3 is
    for."""
    moved, often = each.grad_bytes, each.grad_bytes * microbatches
    said, plain = _UNBOUND
    saves = each.reduces and microbatches > 1
    reason = said.format(moved=show_size(moved), each=show_size(often)) if saves else plain
    return _cadence(each, ONCE, 1, reason)


def _cadence(each: _Open, reduce_every: int, reuse: int, reason: str) -> Cadence:
    return Cadence(
        each.origin,
        reduce_every if each.reduces else None,
        reuse if each.gathers else None,
        reason,
    )
