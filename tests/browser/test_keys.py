"""Keys of the timeline: what is chosen, what stands out, and that no key stays pressed."""

from __future__ import annotations

import time

import pytest

from .chromium import Chromium
from .opened import place_of, state, window


def _chosen(opened: Chromium) -> tuple[int, int]:
    place = state(opened, "selection.place")
    return place["track"], place["span"]


def test_arrows_go_along_a_stream(opened: Chromium) -> None:
    lane = opened.evaluate(
        "(({ timeline, track, spans }) => [timeline, track, ...spans.slice(3, 6)])"
        "(piper.pictures.timeline.layout.lanes.find((l) => l.kind === 'computation'))"
    )
    timeline, track, before, span, after = lane
    x, y = place_of(opened, timeline, track, span)
    opened.do("click", x=x, y=y)
    opened.do("press", key="ArrowRight")
    assert _chosen(opened) == (track, after)
    opened.do("press", key="ArrowLeft")
    assert _chosen(opened) == (track, span)
    opened.do("press", key="ArrowLeft")
    assert _chosen(opened) == (track, before)


def test_m_keeps_and_drops_a_microbatch(opened: Chromium) -> None:
    span = opened.evaluate(
        "(({ num, labels, which }) => [...Array(num).keys()]"
        ".find((i) => labels.microbatch[which[i]] === 2 && labels.name(which[i]).startsWith('F[')))"
        "(piper.report.timelines[0].tracks[0])"
    )
    x, y = place_of(opened, 0, 0, span)
    opened.do("move", x=x, y=y)
    assert state(opened, "microbatch") == 2 and not state(opened, "pinned")
    opened.do("press", key="m")
    opened.do("move", x=700, y=8)
    assert state(opened, "microbatch") == 2 and state(opened, "pinned")
    opened.do("press", key="m")
    assert state(opened, "microbatch") is None and not state(opened, "pinned")
    opened.do("move", x=x, y=y)
    opened.do("move", x=700, y=8)
    assert state(opened, "microbatch") is None


def _with_control(opened: Chromium) -> None:
    opened.do("hold", key="Control")
    opened.do("release", key="w")
    opened.do("release", key="Control")


def _elsewhere(opened: Chromium) -> None:
    """As when another window takes the focus, and hears the key come up."""
    opened.evaluate("dispatchEvent(new Event('blur'))")


@pytest.mark.parametrize("end", [_with_control, _elsewhere])
@pytest.mark.parametrize("tab", ["1", "2"])
def test_no_key_stays_pressed(opened: Chromium, tab: str, end) -> None:  # type: ignore[no-untyped-def]
    whole = window(opened)
    opened.do("press", key=tab)
    opened.do("hold", key="w")
    opened.wait(f"piper.viewport.length < {whole[1] - whole[0]}")
    end(opened)
    time.sleep(0.1)  # a frame may be under way
    still = window(opened)
    time.sleep(0.3)
    assert window(opened) == still
    opened.do("release", key="w")
