"""Reports in a real browser: they load, zoom, pan, and answer clicks with what `piper explain` says."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from piper.insight.causes import Causes
from piper.insight.gaps import gap_at
from piper.insight.reason_text import gap_text
from piper.observe.timeline import Timeline
from piper.plan.report.explain import explain
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.view.show import machine_for

from .chromium import Chromium

SLOWEST = 3000  # milliseconds until a report is there
LARGEST = 10 << 20
_NUMBER = re.compile(r"\d+\.\d{3}")

# Where a span is on the page: its middle.
_PLACE = """(() => {
  const { pictures: { timeline: picture }, report } = piper;
  const found = [%d, %d, %d];
  const lane = picture.laneOf(...found);
  const track = report.timelines[found[0]].tracks[found[1]];
  const box = picture.canvas.getBoundingClientRect();
  const x = picture.x((track.start[found[2]] + track.end[found[2]]) / 2);
  return [box.x + x, box.y + picture.top(lane) + lane.height / 2];
})()"""


def place_of(chromium: Chromium, timeline: int, track: int, span: int) -> tuple[float, float]:
    x, y = chromium.evaluate(_PLACE % (timeline, track, span))
    return x, y


def state(chromium: Chromium, name: str) -> Any:
    return chromium.evaluate(f"piper.store.state.{name}")


def window(chromium: Chromium) -> tuple[float, float]:
    begin, end = chromium.evaluate("[piper.viewport.begin, piper.viewport.end]")
    return begin, end


@pytest.fixture
def opened(chromium: Chromium, both: Path) -> Chromium:
    chromium.open(both)
    return chromium


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_run_of_four_ranks(chromium: Chromium, both: Path, screenshots: Path, theme: str) -> None:
    took = chromium.open(both, theme=theme)
    print(f"4 ranks, simulated and measured: {took:.0f} ms, {both.stat().st_size:,} bytes")
    assert took < SLOWEST
    head = chromium.text("header")
    assert "DualPipeV · pp 2 × ep 2 · ZeRO-2 · 4 microbatches" in head
    for figure in ("simulated step", "measured step", "peak memory", "exposed comm.", "bubble"):
        assert figure in head
    assert chromium.evaluate("document.documentElement.dataset.theme") == theme
    for number, tab in enumerate(("timeline", "memory", "communication", "graph"), start=1):
        chromium.do("press", key=str(number))
        assert state(chromium, "tab") == tab
        chromium.do("picture", path=f"{screenshots}/run-{tab}-{theme}.png")
    assert chromium.problems == []


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
    assert chromium.problems == []


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


def test_zoom_and_pan(opened: Chromium) -> None:
    whole = window(opened)
    at = "piper.pictures.timeline.time(500 - piper.pictures.timeline.canvas.getBoundingClientRect().x)"
    before = opened.evaluate(at)
    opened.do("wheel", x=500, y=300, by=-240, keys=["Control"])
    begin, end = window(opened)
    assert end - begin < 0.8 * (whole[1] - whole[0])
    assert opened.evaluate(at) == pytest.approx(before)  # what is under the pointer stays there
    opened.do("press", key="w", ms=200)
    closer = window(opened)
    assert closer[1] - closer[0] < end - begin
    opened.do("press", key="d", ms=150)
    right = window(opened)
    assert right[0] > closer[0] and right[1] - right[0] == pytest.approx(closer[1] - closer[0])
    opened.do("drag", x=400, y=300, toX=700, toY=300)
    assert window(opened)[0] < right[0]
    opened.do("press", key="s", ms=150)
    back = window(opened)
    assert back[1] - back[0] > right[1] - right[0]
    opened.do("press", key="f")  # nothing is chosen: the whole step
    opened.wait("piper.viewport.length === piper.viewport.whole.end - piper.viewport.whole.begin")
    opened.do("press", key="?")
    assert "critical path" in opened.text("#help")
    assert opened.problems == []


_PIXELS = """(() => {
  const { pictures: { timeline: picture }, report } = piper;
  const context = picture.canvas.getContext("2d");
  const found = {};
  for (const lane of picture.layout.lanes) {
    if (!picture.visible(lane) || lane.kind !== "computation") continue;
    const track = report.timelines[lane.timeline].tracks[lane.track];
    for (const span of lane.spans) {
      const [from, to] = [picture.x(track.start[span]), picture.x(track.end[span])];
      if (to - from < 6 || from < 170 || from > picture.width - 6) continue;
      const label = track.label(span);
      const y = picture.top(lane) + 2;
      const [r, g, b] = context.getImageData(from + 3, y, 1, 1).data;
      const hex = "#" + [r, g, b].map((v) => v.toString(16).padStart(2, "0")).join("");
      const full = hex === report.styles[track.labels.style[label]].color;
      const microbatch = track.labels.microbatch[label];
      (found[microbatch] ??= []).push([lane.track, full]);
    }
  }
  return found;
})()"""


def test_a_microbatch_stands_out_on_all_ranks(opened: Chromium) -> None:
    """As pixels: its spans keep their colours, those of others do not."""
    opened.evaluate("piper.viewport.set(0, piper.report.timelines[0].end)")
    opened.do("press", key="Escape")
    x, y = place_of(opened, 0, 0, _span(opened, 0, 0, "F[PP=0.0,MB=1]"))
    opened.do("click", x=x, y=y)
    opened.do("move", x=700, y=8)
    assert state(opened, "microbatch") == 1
    opened.evaluate("piper.store.set({ selection: null })")  # no frame around it
    opened.evaluate("piper.pictures.timeline.draw()")
    drawn = opened.evaluate(_PIXELS)
    assert {track for track, _ in drawn["1"]} == {0, 1, 2, 3}
    assert all(full for _, full in drawn["1"])
    assert not any(full for _, full in (*drawn["0"], *drawn["2"]))
    opened.do("press", key="Escape")
    opened.evaluate("piper.pictures.timeline.draw()")
    assert all(full for each in opened.evaluate(_PIXELS).values() for _, full in each)


def _span(chromium: Chromium, timeline: int, track: int, name: str) -> int:
    code = """(() => {
      const track = piper.report.timelines[%d].tracks[%d];
      for (let i = 0; i < track.num; i++) if (track.spanName(i) === %r) return i;
      return -1;
    })()"""
    span = int(chromium.evaluate(code % (timeline, track, name)))
    assert span >= 0
    return span


def test_a_click_on_a_span_says_what_it_waited_for(opened: Chromium, screenshots: Path) -> None:
    opened.evaluate("piper.viewport.set(0, piper.report.timelines[0].end)")
    opened.evaluate("piper.pictures.timeline.draw()")
    span = _span(opened, 0, 2, "F[PP=1.0,MB=2]")
    x, y = place_of(opened, 0, 2, span)
    opened.do("click", x=x, y=y)
    opened.wait("document.querySelector('#details h2').innerText.includes('F[PP=1.0,MB=2]')")
    text = opened.text("#details")
    assert "It waited for" in text and "s.place(where(PP=1), mesh.at(pp=1))" in text
    assert "reads its result" in text and "alive before it" in text  # as the plan explains it
    opened.do("picture", path=f"{screenshots}/span.png")
    opened.do("press", key="f")
    opened.wait("piper.viewport.length < piper.report.timelines[0].end / 4")
    opened.do("choose", selector="#details button.task")  # what it waited for is chosen
    assert state(opened, "selection.kind") == "span"
    assert opened.evaluate("piper.store.state.selection.place.span") != span
    assert opened.problems == []


def test_a_click_on_a_gap_says_why(opened: Chromium, screenshots: Path) -> None:
    """The longest gap of rank 3 in the simulated step."""
    code = """(() => {
      const { pictures: { timeline: picture }, report } = piper;
      const track = report.timelines[0].tracks[3];
      const lane = picture.layout.lanes.find((l) => l.timeline === 0 && l.track === 3);
      piper.viewport.set(0, report.timelines[0].end);
      picture.draw();
      const box = picture.canvas.getBoundingClientRect();
      const y = box.y + picture.top(lane) + lane.height / 2;
      return [box.x + picture.x(track.start[lane.spans[0]] / 2), y];
    })()"""
    x, y = opened.evaluate(code)
    opened.do("click", x=x, y=y)
    opened.wait("document.querySelector('#details h2').innerText === 'Gap'")
    text = opened.text("#details")
    assert "rank 3 computes nothing from 0.000 to" in text
    assert "it needs" in text and "which waits for its peer" in text
    opened.do("picture", path=f"{screenshots}/gap.png")
    assert opened.problems == []


def _same(ours: list[str], theirs: list[str]) -> None:
    """But for the last digit of a time."""
    assert [_NUMBER.sub("T", line) for line in ours] == [_NUMBER.sub("T", line) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        numbers = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
        assert all(abs(float(a) - float(b)) < 0.0015 for a, b in numbers), (one, other)


@pytest.mark.parametrize("which", ["run", "plan"])
def test_gaps_are_explained_as_by_piper_explain(
    chromium: Chromium, request: pytest.FixtureRequest, which: str
) -> None:
    """Of hosts that compute, and of devices that hosts give tasks to."""
    if which == "run":
        plan, timeline = request.getfixturevalue("recorded")
        chromium.open(request.getfixturevalue("both"))
    else:
        plan = request.getfixturevalue("large_plan")
        timeline = simulate(plan, machine_for(plan, "h100"), steps=2, by_rank=True)
        chromium.open(request.getfixturevalue("large"))
    shown = 1 if which == "run" else 0
    causes = Causes(plan, timeline, len(timeline.steps) - 1)
    length = causes.end - causes.begin
    chance, compared = random.Random(0), 0
    for _ in range(100):
        rank, time = chance.randrange(plan.mesh.size), chance.random() * length
        gap = gap_at(causes, rank, causes.begin + time)
        near = gap and min(abs(causes.begin + time - edge) for edge in (gap.begin, gap.end)) < 1e-8
        if gap is None or near:
            continue
        _same(
            chromium.evaluate(f"piper.answers.gap({shown}, {rank}, {time * 1e3!r})"),
            list(gap_text(causes, gap)),
        )
        compared += 1
    assert compared > 40


@pytest.mark.parametrize("which", ["run", "plan"])
def test_tasks_are_explained_as_by_piper_explain(
    chromium: Chromium, request: pytest.FixtureRequest, which: str
) -> None:
    plan: Plan
    if which == "run":
        plan, _ = request.getfixturevalue("recorded")
        chromium.open(request.getfixturevalue("both"))
        chosen = [(i, t) for i, part in enumerate(plan.classes) for t in range(len(part.tasks))]
    else:
        plan = request.getfixturevalue("large_plan")
        chromium.open(request.getfixturevalue("large"))
        chance = random.Random(1)
        parts = [chance.randrange(len(plan.classes)) for _ in range(12)]
        chosen = [(part, chance.randrange(len(plan.classes[part].tasks))) for part in parts]
    for part, task in chosen:
        shown = chromium.evaluate(f"piper.answers.task({part}, {task})")
        expected = explain(plan, plan.classes[part].tasks[task].name)  # on all classes that have it
        assert "\n".join(shown) in expected


def test_tasks_are_found_by_name(opened: Chromium) -> None:
    opened.do("press", key="/")
    for letter in "F[PP=2.1,MB=3]":
        opened.do("press", key=letter)
    assert opened.text(".found") == "4"  # two ranks, simulated and measured
    opened.do("press", key="Enter")
    assert opened.text(".found") == "1 of 4"
    chosen = opened.evaluate("piper.store.state.selection")
    assert (chosen["timeline"], chosen["place"]["track"]) == (0, 2)
    assert (
        state(opened, "microbatch") == 3 and state(opened, "path") is False
    )  # letters are no keys there
    assert opened.problems == []


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
    assert opened.problems == []


def test_the_critical_path_sums_up_to_the_step(opened: Chromium, screenshots: Path) -> None:
    opened.do("press", key="p")
    assert state(opened, "path") is True
    whole, parts = opened.evaluate(
        "(({ end, path }) => [end, path.parts.map((p) => p.end - p.begin)])(piper.report.timelines[1])"
    )
    assert sum(parts) == pytest.approx(whole, rel=1e-3)
    opened.do("picture", path=f"{screenshots}/path.png")
    assert opened.problems == []


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
    assert opened.problems == []


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
    assert opened.problems == []
