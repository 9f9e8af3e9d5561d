"""A report that is open in a browser: what it shows, and where on the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from piper.insight.causes import Causes
from piper.observe.timeline import Timeline
from piper.plan.types import Plan

from .chromium import Chromium

_WIDE = 16.0  # pixels, which are hit for sure

# From when to when a span runs, and its lane.
_SPAN = """const lane = picture.laneOf(%d, %d, %d);
  const track = report.timelines[%d].tracks[%d];
  const [begin, end] = [track.start[%d], track.end[%d]];"""
_TIME = """const lane = picture.layout.lanes.find((l) => l.timeline === %d && l.track === %d);
  const [begin, end] = [%r, %r];"""
# Where their middle is on the page, and how many pixels they are long; ranks scroll until they are seen.
_PLACE = """(() => {
  const { pictures: { timeline: picture }, report } = piper;
  %s
  if (picture.top(lane) < 30 || picture.top(lane) + lane.height > picture.height)
    picture.scrollTo(lane.y - picture.height / 2);
  const box = picture.canvas.getBoundingClientRect();
  const [from, to] = [picture.x(begin), picture.x(end)];
  return [box.x + (from + to) / 2, box.y + picture.top(lane) + lane.height / 2, to - from];
})()"""


def state(chromium: Chromium, name: str) -> Any:
    return chromium.evaluate(f"piper.store.state.{name}")


def window(chromium: Chromium) -> tuple[float, float]:
    begin, end = chromium.evaluate("[piper.viewport.begin, piper.viewport.end]")
    return begin, end


def place_of(chromium: Chromium, timeline: int, track: int, span: int) -> tuple[float, float]:
    """The middle of a span, as large as it is."""
    x, y, _ = chromium.evaluate(_PLACE % _span_code(timeline, track, span))
    return x, y


def _span_code(timeline: int, track: int, span: int) -> str:
    return _SPAN % (timeline, track, span, timeline, track, span, span)


@dataclass(frozen=True)
class Opened:
    """A report that is open, and the timeline of it, by number, that Python knows as well."""

    chromium: Chromium
    plan: Plan
    timeline: Timeline
    shown: int

    @cached_property
    def causes(self) -> Causes:
        return Causes(self.plan, self.timeline)

    def milliseconds(self, time: float) -> float:
        """As the page counts them: from the begin of the step."""
        return (time - self.causes.begin) * 1e3

    def span(self, track: int, name: str) -> int:
        """The span of a task, by its place in the step."""
        found, spans = self.timeline.tracks[track], self.causes.spans[track]
        return next(i for i, at in enumerate(spans) if found.labels[found.which[at]].name == name)

    def click_span(self, track: int, span: int) -> None:
        self._click(_span_code(self.shown, track, span))

    def click_gap(self, track: int, begin: float, end: float) -> None:
        """Seconds of the timeline."""
        times = (self.milliseconds(begin), self.milliseconds(end))
        self._click(_TIME % (self.shown, track, *times))

    def _click(self, code: str) -> None:
        """Zoom with the wheel until it is large enough, and click its middle."""
        x, y, wide = self.chromium.evaluate(_PLACE % code)
        for _ in range(40):
            if wide >= _WIDE:
                break
            self.chromium.do("wheel", x=x, y=y, by=-240, keys=["Control"])
            x, y, wide = self.chromium.evaluate(_PLACE % code)
        self.chromium.do("click", x=x, y=y)

    def heading(self, text: str) -> None:
        """Wait until the panel is about something."""
        self.chromium.wait(f"document.querySelector('#details h2')?.innerText.includes({text!r})")

    def lines(self, selector: str) -> list[str]:
        """The texts of the panel's parts."""
        code = f"[...document.querySelectorAll('#details {selector}')].map((e) => e.textContent)"
        return [str(line) for line in self.chromium.evaluate(code)]
