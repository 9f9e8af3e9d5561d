"""Predictions: a measured and a predicted step of one plan in; kind by kind what was predicted, what was
measured, and the likely reason where they are apart, out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from piper.insight.causes import Causes, Place
from piper.insight.critical_path import kind_of
from piper.insight.gaps import largest_gaps
from piper.insight.use_of_time import length, union, use_of_time

IDLE = "no computation"
NEAR = 0.05  # of the prediction: no reason is asked for
_BESIDE = 0.02  # of a span, for it to count as beside something
_APART = 1.1  # times, for one group of spans to differ from another
_AT_ONCE = 0.1  # of a span, that is left when the host is through with starting it


class KindTime(msgspec.Struct, frozen=True):
    """Seconds of a step, on average over the ranks: communication from when all members are there.
    The last row is when a rank computes nothing, whatever it waits for."""

    kind: str
    tasks: int
    predicted: float
    measured: float
    reason: str = ""

    @property
    def apart(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class _Pair:
    """A span and its prediction."""

    place: Place
    rank: int
    measured: float
    predicted: float
    waited: float  # for its peers
    foreseen: float


def by_kind(measured: Causes, predicted: Causes) -> list[KindTime]:
    """What is furthest apart comes first."""
    kinds: dict[str, list[_Pair]] = defaultdict(list)
    tracks = measured.timeline.tracks
    for number, track in enumerate(tracks):
        twin = predicted.track_number(track.ranks[0])
        spans = zip(measured.spans[number], predicted.spans[twin], strict=True)
        for mine, other in spans:
            here, there = Place(number, mine), Place(twin, other)
            took, waited = _parts(measured, here)
            should, foreseen = _parts(predicted, there)
            pair = _Pair(here, track.ranks[0], took, should, waited, foreseen)
            kinds[kind_of(track.labels[track.which[mine]])].append(pair)
    reasons = _Reasons(measured)
    found = [
        KindTime(
            kind,
            len(pairs),
            sum(pair.predicted for pair in pairs) / len(tracks),
            sum(pair.measured for pair in pairs) / len(tracks),
            reasons.of(pairs),
        )
        for kind, pairs in kinds.items()
    ]
    found.append(KindTime(IDLE, 0, _idle(predicted), _idle(measured), _waited_for(measured)))
    return sorted(found, key=lambda each: -abs(each.apart))


def _parts(causes: Causes, place: Place) -> tuple[float, float]:
    """How long a span took once all members were there, and how long it waited for them."""
    began = causes.began(place)
    return max(causes.span(place).end - began, 0.0), max(began - causes.came(place), 0.0)


def _idle(causes: Causes) -> float:
    uses = use_of_time(causes.timeline, causes.step)
    ranks = [len(track.ranks) for track in causes.timeline.tracks]
    lost = sum((use.seconds - use.computing) * n for use, n in zip(uses, ranks, strict=True))
    return lost / sum(ranks)


def _waited_for(causes: Causes) -> str:
    """What most of the idle time goes back to."""
    found: dict[str, float] = defaultdict(float)
    whole = 0.0
    for gap in largest_gaps(causes, most=200):
        whole += gap.seconds
        if gap.chain:
            last = gap.chain[-1]
            task = last.task.partition("[")[0]
            who = f"waiting for {last.track}: {task}"
            if last.why == "host" and not causes.host_computes:
                who = f"launch-bound: waiting for the host of {last.track}"
            found[who] += gap.seconds
    if not found:
        return ""
    who, seconds = max(found.items(), key=lambda item: item[1])
    return f"{who} ({seconds / whole:.0%} of it)"


class _Reasons:
    def __init__(self, causes: Causes) -> None:
        self.causes = causes
        self.computing: list[list[tuple[float, float]]] = []
        self.talking: list[list[tuple[float, float]]] = []
        for number, track in enumerate(causes.timeline.tracks):
            computing, talking = [], []
            for index in causes.spans[number]:
                place = Place(number, index)
                if track.labels[track.which[index]].communicates:
                    talking.append((causes.began(place), track.end[index]))
                else:
                    computing.append((track.start[index], track.end[index]))
            self.computing.append(union(computing))
            self.talking.append(union(talking))

    def of(self, pairs: Sequence[_Pair]) -> str:
        talks = self.causes.span(pairs[0].place).label.communicates
        parts = (self._speed(pairs, talks), self._late(pairs) if talks else "")
        return "; ".join(filter(None, parts))

    def _speed(self, pairs: Sequence[_Pair], talks: bool) -> str:
        """Why the work itself is not as fast as predicted."""
        ratio = _ratio(pairs)
        if abs(ratio - 1) <= NEAR:
            return ""
        found = _one_rank(pairs) or self._beside(pairs, talks)
        if not found and not talks and not self.causes.host_computes:
            found = self._launch_bound(pairs)
        return found or f"{ratio:.2f} x everywhere"

    def _late(self, pairs: Sequence[_Pair]) -> str:
        """Members that came one after the other, more so than predicted."""
        more = sum(pair.waited - pair.foreseen for pair in pairs)
        if more <= 0.25 * sum(pair.measured for pair in pairs):
            return ""
        last: dict[int, float] = defaultdict(float)
        for pair in pairs:
            place = self.causes.last_to_come(pair.place)
            last[self.causes.timeline.tracks[place.track].ranks[0]] += pair.waited
        rank, seconds = max(last.items(), key=lambda item: item[1])
        whole = sum(last.values())
        share = f"{seconds / whole:.0%} of the wait is for rank {rank}" if whole else ""
        each = more / len(pairs) * 1e3
        return f"skew: members come {each:.3f} ms later than predicted; {share}"

    def _beside(self, pairs: Sequence[_Pair], talks: bool) -> str:
        """Whether what goes on beside makes it slower."""
        others = self.computing if talks else self.talking
        what = "computation" if talks else "communication"
        groups: dict[bool, list[_Pair]] = {True: [], False: []}
        for pair in pairs:
            track = self.causes.timeline.tracks[pair.place.track]
            end = track.end[pair.place.span]
            begin = end - pair.measured
            shared = length(_clipped(others[pair.place.track], begin, end))
            groups[shared > _BESIDE * max(end - begin, 1e-12)].append(pair)
        with_it, without = _ratio(groups[True]), _ratio(groups[False])
        if groups[True] and groups[False] and with_it - 1 > 2 * abs(without - 1):
            return f"contention: {with_it:.2f} x beside {what}, {without:.2f} x without"
        if groups[True] and not groups[False] and with_it > 1:
            return f"contention: all of it is beside {what}"
        return ""

    def _launch_bound(self, pairs: Sequence[_Pair]) -> str:
        at_once = 0
        for pair in pairs:
            track = self.causes.timeline.tracks[pair.place.track]
            left = track.end[pair.place.span] - track.issued[pair.place.span]
            at_once += left < _AT_ONCE * pair.measured
        if at_once <= len(pairs) / 2:
            return ""
        return f"launch-bound: {at_once / len(pairs):.0%} end as soon as the host has started all"


def _ratio(pairs: Iterable[_Pair]) -> float:
    pairs = list(pairs)
    predicted = sum(pair.predicted for pair in pairs)
    return sum(pair.measured for pair in pairs) / predicted if predicted else 1.0


def _one_rank(pairs: Sequence[_Pair]) -> str:
    ranks: dict[int, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        ranks[pair.rank].append(pair)
    if len(ranks) < 2:
        return ""
    rank, mine = max(ranks.items(), key=lambda item: _ratio(item[1]))
    rest = _ratio(pair for pair in pairs if pair.rank != rank)
    if _ratio(mine) <= _APART * rest:
        return ""
    return f"rank {rank} takes {_ratio(mine):.2f} x, the others {rest:.2f} x"


def _clipped(
    spans: Sequence[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Of spans without overlaps, which ascend."""
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, lo=first, key=lambda span: span[0])
    return [(max(a, begin), min(b, end)) for a, b in spans[first:last]]
