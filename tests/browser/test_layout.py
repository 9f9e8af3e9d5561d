"""Sizes of a window: nothing of the page is outside of it, on no tab, whatever stands out."""

from __future__ import annotations

from typing import Any

import pytest

from .chromium import Chromium
from .opened import Opened, place_of

# How much wider or higher the page is than the window, and what of a tab is not wholly in it.
_OUTSIDE = """(() => {
  const inside = ({ width, left, top, right, bottom }) =>
    width && left >= 0 && top >= 0 && right < innerWidth + 0.5 && bottom < innerHeight + 0.5;
  const names = ["header", "header button", ".toolbar", ".toolbar :is(button, input)", "main", %s];
  const outside = names.filter((name) => {
    const found = [...document.querySelectorAll(name)];
    return !found.length || !found.every((each) => inside(each.getBoundingClientRect()));
  });
  const { documentElement: root, body } = document;
  const wider = Math.max(root.scrollWidth, body.scrollWidth) - innerWidth;
  const higher = Math.max(root.scrollHeight, body.scrollHeight) - innerHeight;
  return [wider, higher, ...outside];
})()"""
_OF_TABS = {
    "1": "'canvas.picture', '#details', '.legend'",
    "2": "'canvas.picture', '#details', '.legend'",
    "3": "'.matrix'",
    "4": "'.directives', '.graph'",
}


def _outside(chromium: Chromium, tab: str) -> Any:
    chromium.do("press", key=tab)
    return chromium.evaluate(_OUTSIDE % _OF_TABS[tab])


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 640)])
def test_a_report_fits_its_window(report: Opened, width: int, height: int) -> None:
    """Also one that was larger before."""
    chromium = report.chromium
    for tab in _OF_TABS:
        chromium.do("size", width=1600, height=900)
        assert _outside(chromium, tab) == [0, 0]
        chromium.do("size", width=width, height=height)
        assert _outside(chromium, tab) == [0, 0], tab
    chromium.do("press", key="1")
    x, y = place_of(chromium, 0, 0, 0)
    chromium.do("click", x=x, y=y)
    chromium.do("press", key="p")
    assert _outside(chromium, "1") == [0, 0]
    longest = max(range(len(report.plan.history)), key=lambda n: len(str(report.plan.history[n])))
    chromium.evaluate(f"piper.store.set({{ directive: {longest} }})")
    assert _outside(chromium, "1") == [0, 0]
