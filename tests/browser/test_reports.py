"""Reports in a real browser: they load, and every tab shows what is in the plan and the timelines."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from piper.observe.timeline import Timeline
from piper.plan.types import Plan

from .chromium import Chromium
from .opened import state

SLOWEST = 3000  # milliseconds until a report is there
LARGEST = 10 << 20


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_run_of_four_ranks(chromium: Chromium, both: Path, screenshots: Path, theme: str) -> None:
    took = chromium.open(both, theme=theme)
    print(f"4 ranks, simulated and measured: {took:.0f} ms, {both.stat().st_size:,} bytes")
    assert took < SLOWEST
    head = chromium.text("header")
    assert "DualPipeV · pp 2, dp 2, ep 2 · ZeRO-2 · 4 microbatches" in head
    for figure in ("simulated step", "measured step", "peak memory", "exposed comm.", "bubble"):
        assert figure in head
    assert chromium.evaluate("document.documentElement.dataset.theme") == theme
    for number, tab in enumerate(("timeline", "memory", "communication", "graph"), start=1):
        chromium.do("press", key=str(number))
        assert state(chromium, "tab") == tab
        chromium.do("picture", path=f"{screenshots}/run-{tab}-{theme}.png")


def test_a_plan_of_64_ranks(chromium: Chromium, large: Path, screenshots: Path) -> None:
    took = chromium.open(large)
    spans = chromium.evaluate("piper.report.timelines[0].num")
    print(f"64 ranks, {spans:,} spans: {took:.0f} ms, {large.stat().st_size:,} bytes")
    assert large.stat().st_size < LARGEST
    assert took < SLOWEST
    assert chromium.evaluate("piper.report.timelines[0].tracks.length") == 64
    chromium.do("picture", path=f"{screenshots}/plan-64.png")
    chromium.do("wheel", x=600, y=400, by=3000)  # ranks scroll
    assert chromium.evaluate("piper.pictures.timeline.scroll") > 0
    chromium.do("press", key="3")
    chromium.do("picture", path=f"{screenshots}/plan-64-communication.png")
    chromium.do("press", key="4")
    chromium.do("picture", path=f"{screenshots}/plan-64-graph.png")


def test_the_simulated_step_stands_above_the_measured_one(opened: Chromium) -> None:
    sources = opened.evaluate("piper.report.timelines.map((t) => t.source)")
    assert sources == ["simulated", "measured"]
    tops = opened.evaluate(
        "[0, 1].map((t) => piper.pictures.timeline.layout.lanes.find((l) => l.timeline === t).y)"
    )
    assert tops[0] < tops[1]
    opened.do("choose", selector="[data-switch=paired]")
    order = opened.evaluate(
        "piper.pictures.timeline.layout.heads.map((h) => [h.track, h.timeline])"
    )
    assert order == [[rank, timeline] for rank in range(4) for timeline in range(2)]


def test_memory_at_the_cursor(
    opened: Chromium, recorded: tuple[Plan, Timeline], screenshots: Path
) -> None:
    _, timeline = recorded
    begin, end = timeline.steps[-1]
    chance = random.Random(2)
    for _ in range(40):
        rank, time = chance.randrange(4), chance.random() * (end - begin)
        columns = timeline.tracks[rank].memory
        alive = opened.evaluate(f"piper.answers.alive(1, {rank}, {time * 1e3!r})")
        held = {name: column.at(begin + time) for name, column in columns.items()}
        assert alive["total"] == sum(held.values())
        # What the ledger counts by slots is listed slot by slot.
        for name in ("parameters", "gradients", "saved", "buffers"):
            assert alive["sums"].get(name, 0) == held.get(name, 0), name
    opened.do("press", key="2")
    opened.do("move", x=600, y=220)
    opened.wait("document.querySelector('#details .lead').innerText.includes('at the cursor')")
    first = opened.text("#details")
    assert "Alive on rank" in first and "saved" in first and "MiB" in opened.text("#alive-total")
    opened.do("move", x=180, y=220)
    opened.wait(f"document.querySelector('#details').innerText !== {first!r}")
    opened.do("picture", path=f"{screenshots}/memory-cursor.png")


def test_the_critical_path_sums_up_to_the_step(opened: Chromium, screenshots: Path) -> None:
    opened.do("press", key="p")
    assert state(opened, "path") is True
    whole, parts = opened.evaluate(
        "(({ end, path }) => [end, path.parts.map((p) => p.end - p.begin)])(piper.report.timelines[1])"
    )
    assert sum(parts) == pytest.approx(whole, rel=1e-3)
    opened.do("picture", path=f"{screenshots}/path.png")


def test_bytes_between_ranks(opened: Chromium) -> None:
    opened.do("press", key="3")
    note = opened.text(".matrix-note")
    assert re.fullmatch(r"[\d.]+ MiB in all", note)
    opened.do("choose", selector=".kinds button:text('send')")
    assert opened.text(".matrix-note").endswith("by send")
    x, y, cell = opened.evaluate(
        "(() => { const b = document.querySelector('.matrix').getBoundingClientRect();"
        " return [b.x, b.y, (b.width - 35) / 4]; })()"
    )
    opened.do("move", x=x + 34 + 2.5 * cell, y=y + 34 + 0.5 * cell)
    assert opened.text(".matrix-note").startswith("rank 0 → rank 2: 512.0 KiB")
    opened.do("move", x=x + 34 + 1.5 * cell, y=y + 34 + 0.5 * cell)
    assert opened.text(".matrix-note") == "rank 0 → rank 1: 0 B"


def test_a_directive_before_and_after(opened: Chromium, screenshots: Path) -> None:
    opened.do("press", key="4")
    cards = opened.evaluate("[...document.querySelectorAll('.card')].map((c) => c.innerText)")
    split = next(card for card in cards if "s.split" in card)
    assert "24 → 96 nodes" in split and "+96" in split and "−24" in split
    shard = next(i for i, card in enumerate(cards) if "s.shard" in card)
    assert "80 all_to_all" in cards[shard] and "8 changed" in cards[shard]
    opened.do("choose", selector=f"[data-directive='{shard}']")
    shown = opened.text(".card.chosen")
    assert "+ rows0>F[PP=0,EP=0]" in shown
    changed = re.search(r"~ (.*)", shown)
    assert changed and len(changed[1].split()) == 8  # F and B of four stages: no halves yet
    opened.do("picture", path=f"{screenshots}/directive.png")
    opened.do("choose", selector=".switch button:text('before')")
    assert state(opened, "before") is True and "+ rows0" not in opened.text(".card.chosen")
    opened.do("press", key="1")
    assert "s.shard" in opened.text(".stands-out")  # its tasks stand out in the timeline, too
