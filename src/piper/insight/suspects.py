"""Suspects: a measured and a predicted step of one plan in; who is slower than predicted, out.

Every span is held to its prediction. A rank, a link or a body is a suspect if nearly all of its spans
are slower by one factor that others' are not. The one that explains most is taken first, and what it
explains is taken out before the next one is looked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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

Of = Literal["rank", "link", "body", "gap"]


class Suspect(msgspec.Struct, frozen=True):
    """Who takes `factor` as long as predicted beside others, and how many `seconds` a step that costs on
    all ranks together; a gap has no factor."""

    of: Of
    name: str
    factor: float
    seconds: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        lost = f"{self.seconds * 1e3:.2f} ms"
        if self.of == "gap":
            return f"rank {self.ranks[0]} does nothing for {lost} before {self.name}"
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
    found = [*_standing_out(computing), *_standing_out(talking), *_gaps(measured)]
    return sorted(found, key=lambda suspect: -suspect.seconds)


def body_of(label: Label) -> str:
    """What all microbatches' spans have in common: `F[PP=1]`."""
    tags = ",".join(f"{name}={value}" for name, value in label.tags if name != MICROBATCH)
    return f"{label.phase or label.kind}[{tags}]"


def _held(measured: Causes, predicted: Causes) -> Iterator[_Held]:
    for number, track in enumerate(measured.timeline.tracks):
        rank = track.ranks[0]
        other = _same_rank(predicted, rank)
        spans = zip(measured.spans[number], predicted.spans[other], strict=True)
        tasks = measured.classes[number].tasks
        for (span, same), task in zip(spans, tasks, strict=True):
            place, twin = Place(number, span), Place(other, same)
            took, should = _took(measured, place), _took(predicted, twin)
            if should <= 0.0:
                continue
            label = track.labels[track.which[span]]
            if isinstance(task, Comm):
                if task.facts.receives:
                    continue  # its sender stands for it
                ranks = measured.plan.groups[task.group].ranks(measured.plan.mesh, rank)
                yield _Held(rank, took, should, (("link", "-".join(map(str, ranks))),))
            else:
                yield _Held(rank, took, should, (("rank", str(rank)), ("body", body_of(label))))


def _same_rank(causes: Causes, rank: int) -> int:
    return next(n for n, track in enumerate(causes.timeline.tracks) if rank in track.ranks)


def _took(causes: Causes, place: Place) -> float:
    """Without waiting for peers."""
    return causes.span(place).end - causes.began(place)


def _standing_out(held: list[_Held]) -> Iterator[Suspect]:
    for _ in range(_MOST):
        groups: dict[tuple[Of, str], list[_Held]] = defaultdict(list)
        for each in held:
            for name in each.names:
                groups[name].append(each)
        best: tuple[float, float, tuple[Of, str]] | None = None
        for name, mine in groups.items():
            # What takes longest counts most: an add of a few bytes says little.
            usual = _usual([each for each in held if name not in each.names])
            factor = _usual(mine) / usual if usual else 1.0
            if factor < SLOWER:
                continue
            slow = [each for each in mine if each.ratio > usual * (1 + factor) / 2]
            total = sum(each.predicted for each in mine)
            if sum(each.predicted for each in slow) < CONSISTENT * total:
                continue
            lost = sum(each.seconds - each.predicted * usual for each in mine)
            if best is None or lost > best[0]:
                best = lost, factor, name
        if best is None:
            return
        lost, factor, name = best
        ranks = tuple(sorted({each.rank for each in groups[name]}))
        yield Suspect(name[0], name[1], factor, lost, ranks)
        for each in groups[name]:
            each.seconds /= factor


def _usual(held: list[_Held]) -> float:
    """The median of their ratios, each weighted by how long it should take."""
    if not held:
        return 0.0
    ordered = sorted(held, key=lambda each: each.ratio)
    half = sum(each.predicted for each in held) / 2
    upto = 0.0
    for each in ordered:
        upto += each.predicted
        if upto >= half:
            return each.ratio
    return ordered[-1].ratio


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
