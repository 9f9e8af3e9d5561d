"""Cadences: what directives leave open about communication and memory, chosen by bytes and by memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from piper.check import most_bytes
from piper.check.parties import compressed
from piper.check.peak import peak_of
from piper.compiler.cadence_costs import choice_seconds, made_again, moved
from piper.cost.machine import Machine
from piper.ir.form.byte_sizes import show_size
from piper.ir.graph import Graph
from piper.ir.nodes import ONCE, Node
from piper.ir.precisions import Precision
from piper.ir.tensor_type import dtype_bytes
from piper.plan.cadence import Again, Cadence
from piper.plan.tasks import gathers
from piper.plan.types import Plan
from piper.plan.under_way import most_under_way
from piper.sim.simulate import simulate

_REDUCE = (ONCE, 1)  # what lies between takes as much memory as ONCE, and moves more
_REUSE = (ONCE, 1)  # what lies between is better left to buckets that are kept
_BESIDE = 2  # microbatches: one computes while the other one communicates
_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of them
_NO_MORE = "no more are faster"
_CLOSE = 1.03  # what simulated steps do not tell apart
_AGAIN: tuple[Again, ...] = ("expensive", "nothing")
_UNBOUND = (
    "no memory limit was given, so that whole sums are held and {moved} a step are moved instead of "
    "{each}; reduce_every=1 keeps parts",
    "no memory limit was given",
)


@dataclass(frozen=True)
class _Open:
    """What a directive leaves open, and the bytes that it is about. A `split` leaves open what neither
    reductions nor gathers are about."""

    origin: int
    reduces: bool = False
    gathers: bool = False
    grad_bytes: int = 0  # that one reduction of all its gradients brings


def choose_cadences(
    graph: Graph,
    precision: Precision,
    machine: Machine,
    limit: int | None,
    attempt: Callable[[tuple[Cadence, ...]], Plan],
) -> tuple[Cadence, ...]:
    """For all that the directives of a complete logical graph leave open, of the attempts that fit into
    a limit the one that moves the fewest bytes; the smallest where none fits. What memory is left by
    gathering for each use keeps the parameters of some buckets all step.

    More memory comes from fewer microbatches under way at once, where nobody has ordered them and
    nothing fits otherwise; then from computing again, first what is cheap and then all, unless the user
    speaks of that. It is taken where nothing fits without it, or where the machine would take longer: to
    move the bytes that it spares, or with fewer microbatches beside each other."""
    found = _open_in(graph, precision)
    split = _Open(graph.splits[-1].origin) if graph.splits else None
    if limit is None:
        cadences = tuple(_unbound(each, graph.num_microbatches) for each in found)
        return _no_more_than_pay(graph, cadences, attempt(cadences), machine, attempt)
    search = _Search(found, split, limit, attempt)
    spoken = any(node.recompute for node in graph.chunks)
    tried = [search.best(_reason(limit, []))]
    plain = tried[0].plan
    beside = 0 if tried[0].fits else _beside_each_other(graph, plain)
    if beside > 1:
        tried += search.fewer(beside, _reason(limit, tried))
    for again in () if spoken or not (found or split) else _AGAIN:
        if tried[-1].fits and tried[-1].moves_least and not tried[-1].under_way:
            break
        reason = _reason(limit, tried)
        tried.append(search.best(reason, again=again))
        if beside > 1 and not tried[-1].fits:
            tried += search.fewer(beside, reason, again=again)
    fitting = [each for each in tried if each.fits]
    if not fitting:
        return min(tried, key=lambda each: each.nbytes).cadences
    if any(each.under_way for each in fitting):
        return _soonest(fitting, plain, machine).cadences
    best = min(fitting, key=lambda each: choice_seconds(each.plan, plain, machine))
    return _no_more_than_pay(graph, best.cadences, best.plan, machine, attempt, limit)


def _no_more_than_pay(
    graph: Graph,
    cadences: tuple[Cadence, ...],
    plan: Plan,
    machine: Machine,
    attempt: Callable[[tuple[Cadence, ...]], Plan],
    limit: int | None = None,
) -> tuple[Cadence, ...]:
    """With the fewest microbatches beside each other that are about as fast as all of them."""
    beside = _beside_each_other(graph, plan)
    if beside <= _BESIDE:
        return cadences
    enough = _CLOSE * _simulated(plan, machine)
    for under_way in (number for number in _TRIED if _BESIDE <= number < beside):
        fewer = _with_fewer(cadences, graph.splits[-1].origin, under_way)
        plan = attempt(fewer)
        fits = limit is None or most_bytes(plan) <= limit
        if fits and _simulated(plan, machine) <= enough:
            return fewer
    return cadences


def _with_fewer(cadences: tuple[Cadence, ...], origin: int, under_way: int) -> tuple[Cadence, ...]:
    """With so many microbatches under way, as is said of a `split`."""
    others = tuple(each for each in cadences if each.origin != origin)
    known = next((each for each in cadences if each.origin == origin), None)
    about = known or Cadence(origin, None, None, _NO_MORE)
    return (*others, replace(about, under_way=under_way))


def _soonest(fitting: list[_Found], plain: Plan, machine: Machine) -> _Found:
    """By simulated steps, which tell what waits for what; of those that are close, the first, which
    computes least."""
    seconds = [
        _simulated(each.plan, machine) + made_again(each.plan, plain, machine) for each in fitting
    ]
    return next(f for f, s in zip(fitting, seconds, strict=True) if s <= _CLOSE * min(seconds))


def _simulated(plan: Plan, machine: Machine) -> float:
    """Seconds of a step."""
    return simulate(plan, machine).step_seconds[0]


def _beside_each_other(graph: Graph, plan: Plan) -> int:
    """How many microbatches are under way at once, if one slice has all chunks, and nobody has ordered
    them; else 0."""
    if graph.orders or len(plan.classes) > 1:
        return 0
    (only,) = plan.classes
    return most_under_way(only.tasks, [split.tag for split in graph.splits])[0]


def _reason(limit: int, tried: Sequence[_Found]) -> str:
    """Why a choice would be taken, after those that were tried."""
    if not tried:
        fits = f"of what fits into {show_size(limit)}"
        return f"{fits} it moves the fewest bytes without computing more"
    if not any(each.fits for each in tried):
        return f"nothing fits into {show_size(limit)} without that"
    return f"of what fits into {show_size(limit)} it is estimated to take the least time"


def remaking(graph: Graph, cadences: tuple[Cadence, ...]) -> Graph:
    """A logical graph whose chunks compute again what cadences have them compute again."""
    kept = {cadence.origin: cadence.again for cadence in cadences if cadence.again}
    splits = [split.origin for split in graph.splits]
    changed: dict[str, Node] = {}
    for node in graph.chunks if kept else ():
        named = (*(owner.origin for owner in node.owners), *splits)
        origins = [origin for origin in named if origin in kept]
        if origins and not node.recompute:
            keep = kept[origins[0]]
            cut = node.piece_of >= 0 and keep == "nothing"
            changed[node.name] = replace(node, recompute="pieces" if cut else keep)
    return graph.replacing(changed) if changed else graph


@dataclass(frozen=True)
class _Found:
    """A choice, its plan, what that needs, whether it fits, and whether none could move less."""

    cadences: tuple[Cadence, ...]
    plan: Plan
    nbytes: int
    fits: bool
    moves_least: bool

    @property
    def under_way(self) -> int:
        """Microbatches at most, if that is bounded."""
        return max((cadence.under_way for cadence in self.cadences), default=0)


@dataclass(frozen=True)
class _Search:
    """The choices for what is open, under a limit."""

    found: list[_Open]
    split: _Open | None
    limit: int
    attempt: Callable[[tuple[Cadence, ...]], Plan]

    def fewer(self, beside: int, reason: str, *, again: Again = "") -> list[_Found]:
        """With fewer microbatches under way than those that were `beside` each other: all that fit of
        some numbers, or one."""
        found: list[_Found] = []
        for under_way in (number for number in _TRIED if number < beside):
            found.append(self.best(reason, again=again, under_way=under_way))
            if under_way >= _BESIDE and not found[-1].fits:
                break
        return [each for each in found if each.fits] or found[:1]

    def best(self, reason: str, *, again: Again = "", under_way: int = 0) -> _Found:
        """What fits and moves the fewest bytes, else what takes least memory."""
        gathered = any(each.gathers for each in self.found)
        best: _Found | None = None
        smallest: _Found | None = None
        for reduce_every in _REDUCE if any(each.reduces for each in self.found) else (ONCE,):
            for reuse in _REUSE if gathered else (1,):
                least = reduce_every == ONCE and (reuse == ONCE or not gathered)
                cadences = tuple(
                    replace(_cadence(each, reduce_every, reuse, reason), again=again)
                    for each in self.found
                ) + self._of_split(reason, "" if self.found else again, under_way)
                last = self._tried(cadences, least=least)
                if smallest is None or last.nbytes < smallest.nbytes:
                    smallest = last
                if last.fits:
                    break  # fewer uses move more
            if last.fits and (best is None or moved(last.plan) < moved(best.plan)):
                best = last
            if best is not None and best.moves_least:
                break
        found = best or smallest
        assert found is not None
        return found

    def _of_split(self, reason: str, again: Again, under_way: int) -> tuple[Cadence, ...]:
        """What is chosen about microbatches, if it is something."""
        if self.split is None or not (again or under_way):
            return ()
        return (replace(_cadence(self.split, 1, 1, reason), again=again, under_way=under_way),)

    def _tried(self, cadences: tuple[Cadence, ...], *, least: bool) -> _Found:
        """With as many buckets kept all step as fit."""
        plan = self.attempt(cadences)
        nbytes = most_bytes(plan)
        fits = nbytes <= self.limit
        kept = _with_kept(cadences, plan, self.limit) if fits else cadences
        if kept != cadences and most_bytes(filled := self.attempt(kept)) <= self.limit:
            cadences, plan = kept, filled
        return _Found(cadences, plan, nbytes, fits, least)


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
    once, often = each.grad_bytes, each.grad_bytes * microbatches
    said, plain = _UNBOUND
    saves = each.reduces and microbatches > 1
    reason = said.format(moved=show_size(once), each=show_size(often)) if saves else plain
    return _cadence(each, ONCE, 1, reason)


def _cadence(each: _Open, reduce_every: int, reuse: int, reason: str) -> Cadence:
    return Cadence(
        each.origin,
        reduce_every if each.reduces else None,
        reuse if each.gathers else None,
        reason,
    )
