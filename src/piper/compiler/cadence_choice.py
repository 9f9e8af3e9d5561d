"""Cadences: what directives leave open about reducing and gathering, chosen by bytes and by memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from piper.check import most_bytes
from piper.check.parties import compressed
from piper.check.peak import peak_of
from piper.ir.form.byte_sizes import show_size
from piper.ir.graph import Graph
from piper.ir.nodes import ONCE
from piper.ir.precisions import Precision
from piper.ir.tensor_type import dtype_bytes
from piper.plan.cadence import Cadence
from piper.plan.tasks import gathers, scatters
from piper.plan.types import Plan

_REDUCE = (ONCE, 1)  # what lies between takes as much memory as ONCE, and moves more
_REUSE = (ONCE, 1)  # what lies between is better left to buckets that are kept
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


def choose_cadences(
    graph: Graph,
    precision: Precision,
    limit: int | None,
    attempt: Callable[[tuple[Cadence, ...]], Plan],
) -> tuple[Cadence, ...]:
    """For all that the directives of a complete logical graph leave open, of the attempts that fit into
    a limit the one that moves the fewest bytes; the smallest where none fits. What memory is left by
    gathering for each use keeps the parameters of some buckets all step."""
    found = _open_in(graph, precision)
    if not found or limit is None:
        cadences = tuple(_unbound(each, graph.num_microbatches) for each in found)
        attempt(cadences)
        return cadences
    reason = f"of what fits into {show_size(limit)} it moves the fewest bytes"
    best: tuple[float, tuple[Cadence, ...]] | None = None
    cadences = ()
    for reduce_every in _REDUCE if any(each.reduces for each in found) else (ONCE,):
        for reuse in _REUSE if any(each.gathers for each in found) else (1,):
            cadences = tuple(_cadence(each, reduce_every, reuse, reason) for each in found)
            plan = attempt(cadences)
            if most_bytes(plan) > limit:
                continue
            kept = _with_kept(cadences, plan, limit)
            if kept != cadences and most_bytes(filled := attempt(kept)) <= limit:
                cadences, plan = kept, filled
            moved = _moved(plan)
            best = (moved, cadences) if best is None or moved < best[0] else best
            if (reduce_every, reuse) == (ONCE, ONCE):
                return cadences
            break  # fewer uses move more
    return best[1] if best else cadences


def _with_kept(cadences: tuple[Cadence, ...], plan: Plan, limit: int) -> tuple[Cadence, ...]:
    """The same, and as many buckets kept all step as a plan leaves room for under a limit: those that
    are gathered most often."""
    world = compressed(plan)
    left = {party.slice: limit - peak_of(world, party).total for party in world.parties}
    often: Counter[tuple[int, int]] = Counter()  # (directive, bucket) -> gathers
    for party in world.parties:
        for task in party.tasks:
            if gathers(task) and party.slots[task.target].kind == "gathered":
                often[task.origin, party.slots[task.target].bucket] += 1
    kept: dict[int, list[int]] = defaultdict(list)
    for (origin, number), times in often.most_common():
        bucket = plan.buckets[number]
        size = bucket.size * dtype_bytes(bucket.dtype)
        if times > len(bucket.slices) and all(left[at] >= size for at in bucket.slices):
            kept[origin].append(number)
            for at in bucket.slices:
                left[at] -= size
    return tuple(
        cadence
        if cadence.reuse != 1
        else replace(cadence, kept=tuple(sorted(kept[cadence.origin])))
        for cadence in cadences
    )


def _moved(plan: Plan) -> float:
    """Bytes that all ranks send for gathers and reductions of buckets in a step."""
    total = 0.0
    for found in plan.classes:
        ranks = plan.mesh.size_of(plan.mesh.free(found.slice))
        for task in found.tasks:
            if gathers(task) or scatters(task):
                size = plan.groups[task.group].size(plan.mesh)
                brought = found.slots[task.source].type.nbytes
                total += ranks * task.facts.carries(brought, size)
    return total


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
        found.append(_Open(origin, reduces[origin], gathers[origin], grads))
    return found


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
