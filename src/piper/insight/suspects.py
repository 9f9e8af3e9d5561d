"""Suspects: a measured and a predicted step of one plan in; who is slower than predicted, out.

Every span is held to its prediction. A rank, a link or a body is a suspect if nearly all of its spans
are slower by one factor that others' are not. The one that explains most is taken first, and what it
explains is taken out before the next one is looked for. What is slower everywhere is said once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Literal

import msgspec

from piper.insight.causes import Causes
from piper.observe.flows import Place
from piper.observe.timeline import MICROBATCH, Label
from piper.plan.tasks import Comm

SLOWER = 1.25  # than the others
CONSISTENT = 0.8  # of a suspect's spans are slower than the others
IDLE = 0.02  # of a step, that a rank does nothing for no reason
_MOST = 8
_ALMOST = 1 - 1e-9  # sums of one half, added in another order

Of = Literal["rank", "link", "body", "gap", "all"]


class Suspect(msgspec.Struct, frozen=True):
    """Who takes `factor` as long as predicted beside others, and how many `seconds` a step that costs on
    all ranks together; a gap has no factor. If it is `all` of the step, of its computation or of its
    communication, the prediction may be at fault."""

    of: Of
    name: str
    factor: float
    seconds: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        lost = f"{self.seconds * 1e3:.2f} ms"
        if self.of == "gap":
            return f"rank {self.ranks[0]} does nothing for {lost} before {self.name}"
        if self.of == "all":
            how = f"takes {self.factor:.2f} x as long as predicted, on all ranks alike"
            return f"{self.name} {how}: {lost} in all"
        who = f"{self.of} {self.name}" if self.of != "link" else f"the link of ranks {self.name}"
        return f"{who} takes {self.factor:.2f} x as long as it should: {lost} in all"


@dataclass
class _Held:
    """One span held to its prediction, and all that it could be a sign of."""

    rank: int
    seconds: float
    predicted: float
    names: tuple[tuple[Of, str], ...]

    @property
    def ratio(self) -> float:
        return self.seconds / self.predicted


def suspects(measured: Causes, predicted: Causes) -> list[Suspect]:
    """The most seconds first."""
    held = list(_held(measured, predicted))
    computing = [h for h in held if h.names[0][0] != "link"]
    talking = [h for h in held if h.names[0][0] == "link"]
    found = [*_standing_out(computing), *_standing_out(talking)]
    found += [*_everywhere(computing, talking), *_gaps(measured)]
    return sorted(found, key=lambda suspect: -suspect.seconds)


def body_of(label: Label) -> str:
    """What all microbatches' spans have in common: `F[PP=1]`."""
    tags = ",".join(f"{name}={value}" for name, value in label.tags if name != MICROBATCH)
    return f"{label.phase or label.kind}[{tags}]"


def _held(measured: Causes, predicted: Causes) -> Iterator[_Held]:
    for number, track in enumerate(measured.timeline.tracks):
        rank = track.ranks[0]
        other = predicted.track_number(rank)
        links = _links(measured, number, rank)
        took, should = _times(measured, number, links), _times(predicted, other, links)
        for at, span in enumerate(measured.spans[number]):
            label = track.labels[track.which[span]]
            if should[at] <= 0.0:
                continue
            if links[at]:
                yield _Held(rank, took[at], should[at], (("link", links[at]),))
            elif not label.communicates:
                names: tuple[tuple[Of, str], ...] = (("rank", str(rank)), ("body", body_of(label)))
                yield _Held(rank, took[at], should[at], names)


def _links(measured: Causes, number: int, rank: int) -> list[str]:
    """Of each span of a track the link that it uses, as its ranks; empty for what uses none, and for
    what receives: its sender stands for it."""
    plan = measured.plan
    known: dict[int, str] = {}  # group -> its link
    found = []
    for task in measured.classes[number].tasks:
        link = ""
        if isinstance(task, Comm) and not task.facts.receives:
            if task.group not in known:
                ranks = plan.groups[task.group].ranks(plan.mesh, rank)
                known[task.group] = "-".join(map(str, ranks))
            link = known[task.group]
        found.append(link)
    return found


def _times(causes: Causes, number: int, links: Sequence[str]) -> list[float]:
    """How long each span of a track takes without waiting for peers. What uses one link at once has a
    share of the time each: how many of them meet may differ from the prediction."""
    places = [Place(number, span) for span in causes.spans[number]]
    parts = [(causes.began(place), causes.span(place).end) for place in places]
    times = [end - begin for begin, end in parts]
    by_link: dict[str, list[int]] = defaultdict(list)
    for at, link in enumerate(links):
        if link and times[at] > 0.0:
            by_link[link].append(at)
    for users in by_link.values():
        for at, share in zip(users, shared_times([parts[at] for at in users]), strict=True):
            times[at] = share
    return times


def shared_times(parts: Sequence[tuple[float, float]]) -> list[float]:
    """Of parts of time, each one's share: where several lie on each other, each has an equal one."""
    moments = [(begin, 1, at) for at, (begin, _) in enumerate(parts)]
    moments += [(end, 0, at) for at, (_, end) in enumerate(parts)]
    shares, active, last = [0.0] * len(parts), set[int](), 0.0
    for moment, begins, at in sorted(moments):
        for each in active:
            shares[each] += (moment - last) / len(active)
        last = moment
        if begins:
            active.add(at)
        else:
            active.discard(at)
    return shares


def _standing_out(held: list[_Held]) -> Iterator[Suspect]:
    for _ in range(_MOST):
        ratios = _Ratios(held)
        best: tuple[float, float, tuple[Of, str]] | None = None
        for name, mine in ratios.groups.items():
            # What takes longest counts most: an add of a few bytes says little.
            usual = ratios.usual_without(mine)
            factor = ratios.usual_of(mine) / usual if usual else 1.0
            if factor < SLOWER:
                continue
            spans = [ratios.held[at] for at in mine]
            if not _consistent(spans, usual * (1 + factor) / 2):
                continue
            lost = sum(each.seconds - each.predicted * usual for each in spans)
            if best is None or lost > best[0]:
                best = lost, factor, name
        if best is None:
            return
        lost, factor, name = best
        spans = [ratios.held[at] for at in ratios.groups[name]]
        yield Suspect(name[0], name[1], factor, lost, _ranks(spans))
        for each in spans:
            each.seconds /= factor


def _everywhere(computing: list[_Held], talking: list[_Held]) -> Iterator[Suspect]:
    """What takes longer than predicted although nobody stands out: of one link, itself."""
    slow = {}
    for what, held in (("all computation", computing), ("all communication", talking)):
        ratios = _Ratios(held)
        factor = ratios.usual_of(range(len(held)))
        if factor >= SLOWER and _consistent(held, (1 + factor) / 2):
            slow[what] = factor, held, list(ratios.groups)
    factors = [factor for factor, _, _ in slow.values()]
    others = [held for held in (computing, talking) if held]
    if len(slow) == len(others) and factors and max(factors) < SLOWER * min(factors):
        held = [*computing, *talking]
        factor = _Ratios(held).usual_of(range(len(held)))
        yield Suspect("all", "everything", factor, _lost(held), _ranks(held))
        return
    for what, (factor, held, names) in slow.items():
        of, name = names[0] if what == "all communication" and len(names) == 1 else ("all", what)
        yield Suspect(of, name, factor, _lost(held), _ranks(held))


def _consistent(held: Sequence[_Held], least: float) -> bool:
    """Whether nearly all of it takes more than the least ratio."""
    slow = sum(each.predicted for each in held if each.ratio > least)
    return slow >= CONSISTENT * sum(each.predicted for each in held)


def _lost(held: Sequence[_Held]) -> float:
    return sum(each.seconds - each.predicted for each in held)


def _ranks(held: Sequence[_Held]) -> tuple[int, ...]:
    return tuple(sorted({each.rank for each in held}))


class _Ratios:
    """Medians of the ratios of spans, each weighted by how long it should take. Spans are sorted once;
    `groups` has by name where its own lie among them."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self.held = sorted(held, key=lambda each: each.ratio)
        self.upto = [0.0, *accumulate(each.predicted for each in self.held)]
        self.groups: dict[tuple[Of, str], list[int]] = defaultdict(list)
        for at, each in enumerate(self.held):
            for name in each.names:
                self.groups[name].append(at)

    def usual_of(self, mine: Sequence[int]) -> float:
        """Of the spans that lie there, which ascend; 0 of none."""
        upto = list(accumulate(self.held[at].predicted for at in mine))
        return self.held[mine[_half(upto)]].ratio if upto else 0.0

    def usual_without(self, mine: Sequence[int]) -> float:
        """Of all the others; 0 of none."""
        if len(mine) == len(self.held):
            return 0.0
        own = [0.0, *accumulate(self.held[at].predicted for at in mine)]
        # What all have up to a span, less what they have of it.
        at = bisect_left(
            range(len(self.held)),
            (self.upto[-1] - own[-1]) / 2 * _ALMOST,
            key=lambda at: self.upto[at + 1] - own[bisect_left(mine, at + 1)],
        )
        return self.held[at].ratio


def _half(upto: Sequence[float]) -> int:
    return bisect_left(upto, upto[-1] / 2 * _ALMOST)


def _gaps(measured: Causes) -> Iterator[Suspect]:
    """Starts that came later than anything that they waited for."""
    waits = []
    for number, track in enumerate(measured.timeline.tracks):
        for span in measured.spans[number]:
            place = Place(number, span)
            cause = measured.cause(place)
            if cause.why != "begin":
                waits.append((track.start[span] - cause.at, place))
    least = IDLE * (measured.end - measured.begin)
    usual = median(wait for wait, _ in waits) if waits else 0.0
    for wait, place in sorted(waits, reverse=True)[:_MOST]:
        if wait > max(least, 10 * usual):
            track = measured.timeline.tracks[place.track]
            name = measured.span(place).label.name
            yield Suspect("gap", name, 0.0, wait, (track.ranks[0],))
