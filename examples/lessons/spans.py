"""Of a Timeline: how much of its last step ranks compute, and how much communication that hides."""

from collections.abc import Iterator

from piper.observe.timeline import Span, Timeline, Track

Times = list[tuple[float, float]]


def spans_of(timeline: Timeline, track: Track) -> list[Span]:
    """What a rank does in the last step."""
    return [track[index] for index in track.step(len(timeline.steps) - 1)]


def computing(timeline: Timeline) -> list[float]:
    """For each track the share of the step in which it computes: the rest is bubble, and waiting."""
    begin, end = timeline.steps[-1]
    return [
        sum(last - first for first, last in _busy(spans_of(timeline, track))) / (end - begin)
        for track in timeline.tracks
    ]


def hidden(timeline: Timeline, kind: str) -> float:
    """Of the time that one kind of communication takes on all ranks, how much is beside computation."""
    found = list(_beside(timeline, kind))
    return sum(both for both, _ in found) / sum(whole for _, whole in found)


def _beside(timeline: Timeline, kind: str) -> Iterator[tuple[float, float]]:
    for track in timeline.tracks:
        spans = spans_of(timeline, track)
        busy = _busy(spans)
        for span in spans:
            if span.label.kind == kind:
                both = (min(span.end, last) - max(span.start, first) for first, last in busy)
                yield sum(time for time in both if time > 0), span.seconds


def _busy(spans: list[Span]) -> Times:
    """When it computes; computation is on one stream, so these times do not overlap."""
    return [(span.start, span.end) for span in spans if not span.label.communicates]
