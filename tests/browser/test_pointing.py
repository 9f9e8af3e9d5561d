"""Pointer and keys on the timelines of 4 ranks and of 64: zoom, what stands out, and answers to clicks,
which are those of `piper explain`."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from piper.insight.gaps import gap_at, largest_gaps
from piper.insight.reason_text import gap_text, task_text
from piper.insight.task_spans import task_spans
from piper.observe.flows import Place
from piper.plan.report.explain import explain

from .chromium import Chromium
from .opened import Opened, state, window

_NUMBER = re.compile(r"\d+\.\d{3}")


def _same(ours: list[str], theirs: list[str]) -> None:
    """But for the last digit of a time."""
    assert [_NUMBER.sub("T", line) for line in ours] == [_NUMBER.sub("T", line) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        numbers = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
        assert all(abs(float(a) - float(b)) < 0.0015 for a, b in numbers), (one, other)


def test_zoom_and_pan(report: Opened) -> None:
    chromium = report.chromium
    whole = window(chromium)
    at = "piper.pictures.timeline.time(500 - piper.pictures.timeline.canvas.getBoundingClientRect().x)"
    before = chromium.evaluate(at)
    chromium.do("wheel", x=500, y=300, by=-240, keys=["Control"])
    begin, end = window(chromium)
    assert end - begin < 0.8 * (whole[1] - whole[0])
    assert chromium.evaluate(at) == pytest.approx(before)  # what is under the pointer stays there
    chromium.do("press", key="w", ms=200)
    closer = window(chromium)
    assert closer[1] - closer[0] < end - begin
    chromium.do("press", key="d", ms=150)
    right = window(chromium)
    assert right[0] > closer[0] and right[1] - right[0] == pytest.approx(closer[1] - closer[0])
    chromium.do("press", key="a", ms=100)
    left = window(chromium)
    assert left[0] < right[0] and left[1] - left[0] == pytest.approx(right[1] - right[0])
    chromium.do("drag", x=400, y=300, toX=700, toY=300)
    assert window(chromium)[0] < left[0]
    chromium.do("press", key="s", ms=150)
    back = window(chromium)
    assert back[1] - back[0] > right[1] - right[0]
    chromium.do("press", key="f")  # nothing is chosen: the whole step
    chromium.wait("piper.viewport.length === piper.viewport.whole.end - piper.viewport.whole.begin")
    chromium.do("press", key="?")
    assert "critical path" in chromium.text("#help")


# On each rank, around its first computation of microbatch 1: of which microbatches computations are, and
# whether they have their colours.
_COLOURS = """(() => {
  const { pictures: { timeline: picture }, report } = piper;
  const { canvas } = picture;
  const off = new OffscreenCanvas(canvas.width, canvas.height);
  const copy = off.getContext("2d", { willReadFrequently: true });
  const found = {};
  for (const lane of picture.layout.lanes.filter((lane) => lane.kind === "computation")) {
    const track = report.timelines[lane.timeline].tracks[lane.track];
    const microbatch = (span) => track.labels.microbatch[track.label(span)];
    const first = lane.spans.find((span) => microbatch(span) === 1);
    const long = track.end[first] - track.start[first];
    piper.viewport.set(track.start[first] - 10 * long, track.end[first] + 10 * long);
    picture.scrollTo(lane.y);
    picture.draw();
    copy.drawImage(canvas, 0, 0);
    for (const span of lane.spans) {
      const [from, to] = [picture.x(track.start[span]), picture.x(track.end[span])];
      if (to - from < 4 || from < 170 || to > picture.width) continue;
      const [r, g, b] = copy.getImageData((from + to) / 2, picture.top(lane) + 2, 1, 1).data;
      const hex = "#" + [r, g, b].map((v) => v.toString(16).padStart(2, "0")).join("");
      const full = hex === report.styles[track.labels.style[track.label(span)]].color;
      (found[microbatch(span)] ??= []).push([lane.track, full]);
    }
  }
  return found;
})()"""


def test_a_microbatch_stands_out_on_all_ranks(report: Opened, screenshots: Path) -> None:
    """As pixels: its spans keep their colours, those of others do not."""
    chromium = report.chromium
    report.click_span(0, report.span(0, "F[PP=0.0,MB=1]"))
    chromium.do("move", x=700, y=8)
    assert state(chromium, "microbatch") == 1
    chromium.evaluate("piper.store.set({ selection: null })")  # no frame around it
    ranks = report.plan.mesh.size
    drawn = chromium.evaluate(_COLOURS)
    assert {track for track, _ in drawn["1"]} == set(range(ranks))
    assert all(full for _, full in drawn["1"])
    others = [full for each in drawn.keys() - {"1", "-1"} for _, full in drawn[each]]
    assert others and not any(others)
    chromium.do("picture", path=f"{screenshots}/microbatch-{ranks}.png")
    chromium.do("press", key="Escape")
    assert all(full for each in chromium.evaluate(_COLOURS).values() for _, full in each)


def _waiting(report: Opened, track: int, kind: str) -> int:
    """The span of a task of a kind and of microbatch 2, which waits for the result of another one."""
    stage = report.timeline.tracks[track]
    for at in report.causes.spans[track]:
        label, why = stage.labels[stage.which[at]], report.causes.cause(Place(track, at)).why
        if label.kind == kind and "MB=2" in label.name and why == "data":
            return at
    raise AssertionError(f"no {kind} of {stage.name}")


@pytest.mark.parametrize("kind", ["run", "all_to_all"])
def test_a_click_on_a_span_says_what_it_waited_for(
    report: Opened, screenshots: Path, kind: str
) -> None:
    """On a rank in the middle, as `piper explain` has it of a plan and of a timeline."""
    chromium, causes = report.chromium, report.causes
    ranks = report.plan.mesh.size
    track = ranks // 2
    at = _waiting(report, track, kind)
    stage = causes.timeline.tracks[track]
    name = stage.labels[stage.which[at]].name
    report.click_span(track, report.span(track, name))
    report.heading(name)
    facts = zip(report.lines(".explain th"), report.lines(".explain td"), strict=True)
    in_plan = "\n".join(f"  {word:<8} {line}" for word, line in facts)
    assert in_plan and in_plan in explain(report.plan, name)
    (span,) = (s for s in task_spans(causes, name) if s.track == stage.name)
    links = [*task_text(causes, span)][-len(span.waited_for) - len(span.followed_by) :]
    wanted = [line.strip() for line in links]
    said = {_NUMBER.sub("T", line): line for line in report.lines(".chain li")}
    _same([said[_NUMBER.sub("T", line)] for line in wanted], wanted)
    chromium.do("picture", path=f"{screenshots}/{kind}-{ranks}.png")
    chromium.do("press", key="f")  # the span, with room on both sides
    length = report.milliseconds(stage.end[at]) - report.milliseconds(stage.start[at])
    chromium.wait(f"!piper.viewport.goal && piper.viewport.length < {4.01 * length + 1e-3!r}")
    before = state(chromium, "selection.place")
    chromium.do("choose", selector="#details button.task")  # what it waited for is chosen
    assert state(chromium, "selection.kind") == "span"
    assert state(chromium, "selection.place") != before


def test_a_click_on_a_gap_says_why(report: Opened, screenshots: Path) -> None:
    """The longest gap of the last rank."""
    ranks = report.plan.mesh.size
    (gap,) = largest_gaps(report.causes, most=1, rank=ranks - 1)
    report.click_gap(ranks - 1, gap.begin, gap.end)
    report.heading("Gap")
    title, *why = gap_text(report.causes, gap)
    assert why
    _same(report.lines(".lead"), [title])
    said = report.lines(".chain li")
    _same(said[:12], [line.strip() for line in why[:12]])
    assert len(said) == len(why) or said[12] == f"and so on, {len(why) - 12} more"
    report.chromium.do("picture", path=f"{screenshots}/gap-{ranks}.png")


def test_gaps_are_explained_as_by_piper_explain(report: Opened) -> None:
    causes = report.causes
    length = causes.end - causes.begin
    chance, compared = random.Random(0), 0
    for _ in range(100):
        rank = chance.randrange(report.plan.mesh.size)
        time = causes.begin + chance.random() * length
        gap = gap_at(causes, rank, time)
        if gap is None or min(abs(time - edge) for edge in (gap.begin, gap.end)) < 1e-8:
            continue
        at = report.milliseconds(time)
        said = report.chromium.evaluate(f"piper.answers.gap({report.shown}, {rank}, {at!r})")
        _same(said, list(gap_text(causes, gap)))
        compared += 1
    assert compared > 40


def test_tasks_are_explained_as_by_piper_explain(report: Opened) -> None:
    plan = report.plan
    chosen = [(i, task) for i, part in enumerate(plan.classes) for task in range(len(part.tasks))]
    if len(chosen) > 400:
        chosen = random.Random(1).sample(chosen, 12)
    for part, task in chosen:
        said = report.chromium.evaluate(f"piper.answers.task({part}, {task})")
        expected = explain(plan, plan.classes[part].tasks[task].name)  # on all classes that have it
        assert "\n".join(said) in expected


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
