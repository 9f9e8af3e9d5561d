"""Timelines drawn as text and as SVG: what is where, in which colour, and how large at most."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from piper.errors import FileError
from piper.observe.pictures.characters import draw_text
from piper.observe.pictures.picture import number, ticks
from piper.observe.pictures.styles import STYLES, short_name, style_of
from piper.observe.pictures.svg import draw_svg
from piper.observe.timeline import Label, Timeline, Track
from piper.schedules import SCHEDULES, replay, schedule
from piper.schedules.table_timeline import table_timeline
from tests.timelines import many, two_ranks


def _rows(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith(("rank", "time", "step"))]
    head = len("rank 0 compute ")
    return {line[:head].rstrip(): line[head:] for line in lines}


def test_a_row_for_each_rank_and_stream() -> None:
    rows = _rows(draw_text(two_ranks(), width=115, end=0.020))  # 5 characters a millisecond
    assert rows == {
        "step": "|0",
        "time ms": "0" + " " * 24 + "5" + " " * 24 + "10" + " " * 23 + "15",
        "rank 0 compute": "0F0------------0B0------------0F1------------0B1" + "-" * 12
        + " " * 25 + "uuuuu",
        "rank 0 p2p": " " * 15 + "send---->>",
        "rank 0 dp": " " * 75 + "all_reduce",
        "rank 1 compute": " " * 10 + "1F0------------1B0------------1F1------------1B1" + "-" * 12
        + " " * 15 + "uuuuu",
        "rank 1 p2p": "  recv" + "-" * 19,
        "rank 1 dp": " " * 77 + "RRRRRRRR",
    }  # fmt: skip


def test_names_marks_and_colours() -> None:
    text = draw_text(two_ranks(), end=0.020)
    assert text.endswith("F forward  B backward  u update  > send  < recv  R all_reduce\n")
    assert "\x1b" not in text
    colored = draw_text(two_ranks(), end=0.020, color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()[2].startswith("rank 0 compute 0F0   ")
    for terminal, name in (
        (111, "0F0"),
        (215, "1B1"),
        (103, "send"),
        (144, "recv"),
        (167, " all_r"),
    ):
        assert f"\x1b[38;5;16;48;5;{terminal}m{name}" in colored
    assert len({s.web for s in STYLES.values()}) == len({s.terminal for s in STYLES.values()})
    assert len({s.mark for s in STYLES.values()}) == len(STYLES)


def test_short_names() -> None:
    tags = (("EP", 0), ("MB", 3), ("PP", 2))
    assert short_name(Label("BI[PP=2,MB=3]", "run", "compute", "BI", tags)) == "0.2I3"
    gather = Label("g", "all_gather", "dp", "F", tags, meeting="g")
    assert short_name(gather) == "all_gather"
    assert style_of(gather) is STYLES["all_gather"]  # not of the phase that it works for
    assert style_of(Label("x", "mine", "dp", meeting="x")) is STYLES["communication"]
    assert style_of(Label("x", "norm", "compute")) is STYLES["computation"]
    assert style_of(Label("x", "settle", "compute")) is STYLES["update"]


def test_a_window_and_some_ranks() -> None:
    whole = two_ranks()
    text = draw_text(whole, begin=0.0215, end=0.0225, ranks=[0], width=65)
    rows = _rows(text)
    assert [name for name in rows if name.startswith("rank")] == [
        "rank 0 compute", "rank 0 p2p", "rank 0 dp",
    ]  # fmt: skip
    assert rows["rank 0 compute"] == "0F0".ljust(50, "-")
    assert rows["rank 0 p2p"] == ""
    assert "time µs" in rows and rows["time µs"].split() == ["21500", "22000"]
    assert "step" not in rows  # none begins there
    with pytest.raises(FileError, match="a picture from 3 to 2"):
        draw_text(whole, begin=3, end=2)
    with pytest.raises(FileError, match="no rank 7"):
        draw_svg(whole, ranks=[7])


def test_a_character_shows_the_longest_of_its_spans() -> None:
    labels = (Label("F", "run", "compute", "F"), Label("B", "run", "compute", "B"))
    track = Track("rank 0", (0,), labels, begins=[0])
    for place in range(40):  # of each character 0.4 F, 0.5 B, 0.1 nothing
        track.add(0, place, place, place + 0.4)
        track.add(1, place, place + 0.4, place + 0.9)
    text = draw_text(Timeline("simulated", [track], [(0.0, 40.0)]), width=47)
    assert text.splitlines()[1] == "rank 0 " + "B" * 40


def test_an_svg_has_a_bar_for_each_span() -> None:
    timeline = two_ranks()
    drawing = ElementTree.fromstring(draw_svg(timeline, title="a < b"))
    bars = [group for group in drawing if group.tag.endswith("}g")]
    assert len(bars) == timeline.num_spans
    tooltips = [bar[0].text for bar in bars]
    assert "F[PP=0,MB=0] from 0 to 3 ms; the traced program" in tooltips
    reduction = 'all_reduce>g from 15 to 17 ms, 4,096 bytes; s.replicate(where(), over="dp")'
    assert reduction in tooltips
    texts = [part.text for part in drawing if part.tag.endswith("}text")]
    assert {"a < b", "rank 1 p2p", "ms", "step 1", "forward", "recv"} <= set(texts)
    places = [(float(b[1].get("x")), float(b[1].get("width"))) for b in bars]  # type: ignore[arg-type]
    assert max(x + wide for x, wide in places) <= float(drawing.get("width") or 0) == 1200


def test_very_many_spans_stay_a_picture() -> None:
    timeline = many(200_000)
    assert len(draw_text(timeline, width=120)) < 120 * 12
    text = draw_svg(timeline)
    assert len(text) < 6_000_000
    groups = [int(count) for count in re.findall(r"<title>(\d+) spans", text)]
    single = text.count("<g>") - len(groups)
    assert sum(groups) + single == timeline.num_spans  # merged, none lost
    zoomed = draw_svg(timeline, begin=0.1, end=0.1005, ranks=[2])
    inside = [s for s in timeline.tracks[2] if s.start < 0.1005 and s.end > 0.1]
    assert zoomed.count("<g>") == len(inside) > 50


def test_very_many_ranks_are_left_out_in_words() -> None:
    timeline = many(2_000, ranks=500, labels=4)
    text = draw_text(timeline)
    assert "and 800 more rows; choose ranks to see them" in text
    assert "and 800 more rows" in draw_svg(timeline)
    assert len(text.splitlines()) < 210
    assert "rank 499 dp" in draw_text(timeline, ranks=[499])


def test_an_empty_timeline_is_a_picture() -> None:
    empty = Timeline("measured", [], [])
    assert draw_text(empty) == "\n"
    assert ElementTree.fromstring(draw_svg(empty)) is not None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replay_is_a_timeline(name: str) -> None:
    table = schedule(name, num_ranks=4, num_microbatches=8)
    replayed = replay(table)
    timeline = table_timeline(table, replayed)
    assert (timeline.source, timeline.unit) == ("table", "")
    assert timeline.makespan == replayed.makespan and timeline.steps == [(0, replayed.makespan)]
    for rank, (track, row) in enumerate(zip(timeline.tracks, table.rows, strict=True)):
        assert list(track.start) == replayed.starts[rank]
        assert list(track.end) == replayed.ends[rank]
        assert sum(span.seconds for span in track) == pytest.approx(replayed.busy[rank])
        for cell, span in zip(row, track, strict=True):
            if not cell.joined:
                (action,) = cell.actions
                tags = dict(span.label.tags)
                assert (tags["PP"], span.label.microbatch) == (action.stage, action.microbatch)
                assert tags.get("DIR") == action.direction
                assert (span.label.name, span.label.phase) == (str(action), action.kind)
            elif cell.joined == "OVERLAP_F_B":
                assert span.label.phase == "F&B"


def test_ticks_are_round_and_tell_times_apart() -> None:
    assert ticks(0, 10, about=5) == [0, 2, 4, 6, 8, 10]
    assert ticks(21.3, 24.9, about=4) == [22, 23, 24]
    assert [number(t) for t in ticks(12_000_000.5, 12_000_003.2, about=4)] == [
        "12000001", "12000002", "12000003",
    ]  # fmt: skip
    assert number(0.1 + 0.2) == "0.3" and number(1e6) == "1e+06"
