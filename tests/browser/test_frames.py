"""Frames: what it takes to draw 200,000 spans while they zoom and move."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles

from piper.view.report_data import Shown
from piper.view.show import show_html

from ..timelines import many
from .chromium import Chromium

SPANS = 200_000
LONGEST = 33.0  # milliseconds a frame, on two cores without a GPU

# Zoom in and out, frame by frame, as the keys do; what each frame takes to draw, and how far frames are
# apart.
_ZOOM = """new Promise((done) => {
  const { pictures: { timeline: picture }, viewport } = piper;
  const frames = 120;
  const apart = [];
  picture.frames.length = 0;
  let last = performance.now();
  let left = frames;
  const frame = () => {
    const now = performance.now();
    apart.push(now - last);
    last = now;
    viewport.zoom(viewport.begin + viewport.length * 0.4, left > frames / 2 ? %g : 1 / %g);
    viewport.pan(viewport.length * 0.004);
    picture.draw();
    if (--left) requestAnimationFrame(frame);
    else done([[...picture.frames], apart.slice(1)]);
  };
  requestAnimationFrame(frame);
})"""


def test_frames_at_200_000_spans(chromium: Chromium, tmp_path: Path, screenshots: Path) -> None:
    path = tmp_path / "many.html"
    path.write_text(show_html(None, [Shown("many", many(SPANS, ranks=10))]))
    took = chromium.open(path)
    assert chromium.evaluate("piper.report.timelines[0].num") == SPANS
    assert not chromium.evaluate("piper.pictures.timeline.scrolls")  # all of them are seen
    print(f"{SPANS:,} spans loaded in {took:.0f} ms, {path.stat().st_size:,} bytes")
    for where, factor in (("of nearly the whole step", 0.998), ("down to a fiftieth", 0.94)):
        drawn, apart = chromium.evaluate(_ZOOM % (factor, factor))
        for what, times in (("drawn in", drawn), ("apart by", apart)):
            late = quantiles(times, n=20)[-1]
            print(
                f"  frames {where}: {what} {median(times):.1f} ms, 95 of 100 within {late:.1f} ms"
            )
        assert median(drawn) < LONGEST
        assert median(apart) < LONGEST
    chromium.do("picture", path=f"{screenshots}/spans-200000.png")
