"""The data of a report: what its columns say is what the plan and the timeline say."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from piper.api.job import Job
from piper.check import check_plan
from piper.cli.main import main
from piper.cost.presets import machine
from piper.errors import FileError, PlanError
from piper.insight.causes import Causes
from piper.insight.critical_path import critical_path
from piper.insight.use_of_time import use_of_time
from piper.ir.form.byte_sizes import show_size
from piper.observe.flows import Place
from piper.observe.pictures.svg import draw_svg
from piper.observe.timeline import Timeline
from piper.observe.timeline_files import load_timeline, to_bytes
from piper.plan.memory_ledger import CATEGORIES
from piper.plan.report.track_memory import fill_memory
from piper.plan.types import Plan, class_of
from piper.sim.simulate import simulate
from piper.view import traffic
from piper.view.columns import Columns
from piper.view.in_place import in_place
from piper.view.report_data import Shown, report_block
from piper.view.show import show_html
from piper.view.span_columns import WHYS
from piper.view.step_shares import step_shares
from piper.view.strategy_line import strategy_line
from piper.view.task_graph import without_microbatch

from ..plans import plan_of
from ..timelines import two_ranks


class Read:
    """A block, read back."""

    def __init__(self, block: bytes) -> None:
        length = int.from_bytes(block[:4], "little")
        self.head: dict[str, Any] = json.loads(block[4 : 4 + length])
        self.columns = block[4 + length :]

    def numbers(self, ref: list[Any]) -> list[Any]:
        kind, at, length = ref
        assert at % 8 == 0
        return list(struct.unpack_from(f"<{length}{kind}", self.columns, at))

    def texts(self, ref: list[Any]) -> list[str]:
        return [self.head["strings"][number] for number in self.numbers(ref)]


def simulated(plan: Plan, *, by_rank: bool = False) -> Timeline:
    return simulate(plan, machine("h100"), steps=2, by_rank=by_rank)


def read_report(plan: Plan, timeline: Timeline) -> Read:
    return Read(report_block([Shown("sim", timeline)], plan=plan))


def test_columns_hold_numbers_strings_and_rows() -> None:
    columns = Columns()
    head = {
        "small": columns.counts([1, 2, 255]),
        "large": columns.counts([1 << 40]),
        "negative": columns.column("i", [-3, 4]),
        "texts": columns.texts(["a", "b", "a"]),
        "rows": columns.ragged([[1, 2], [], [3]]),
        "strings": columns.strings,
    }
    found = Read(columns.block(head))
    assert found.numbers(found.head["small"]) == [1, 2, 255] and found.head["small"][0] == "B"
    assert found.numbers(found.head["large"]) == [1 << 40]
    assert found.numbers(found.head["negative"]) == [-3, 4]
    assert found.texts(found.head["texts"]) == ["a", "b", "a"]
    assert found.head["strings"] == ["a", "b"]
    lengths, flat = found.head["rows"]
    assert (found.numbers(lengths), found.numbers(flat)) == ([2, 0, 1], [1, 2, 3])


@pytest.mark.parametrize("by_rank", [False, True])
def test_spans_causes_and_meetings_are_those_of_the_timeline(by_rank: bool) -> None:
    plan = plan_of("zero3")
    timeline = simulated(plan, by_rank=by_rank)
    causes = Causes(plan, timeline, 1)
    found = read_report(plan, timeline)
    rows = found.head["timelines"][0]
    meetings: dict[int, set[str]] = {}
    for number, (row, track) in enumerate(zip(rows["tracks"], timeline.tracks, strict=True)):
        spans = row["spans"]
        step = track.step(1)
        labels = found.head["labels"][row["labels"]]
        assert spans["num"] == len(step) and spans["which"] is None
        assert found.texts(labels["name"]) == [label.name for label in track.labels]
        at = 0
        lengths, backs = found.numbers(spans["length"]), found.numbers(spans["cause"])
        whys, starts = found.numbers(spans["why"]), found.numbers(spans["start"])
        for i, span in enumerate(step):
            at += starts[i]
            assert at * rows["tick"] == pytest.approx(track.start[span] - causes.begin, abs=2e-9)
            length = track.end[span] - track.start[span]
            assert lengths[i] * rows["tick"] == pytest.approx(length, abs=3e-9)
            cause = causes.cause(Place(number, span))
            assert WHYS[whys[i]] == cause.why
            assert (span - backs[i] if backs[i] else None) == (cause.place and cause.place.span)
        for meeting, label in zip(found.numbers(spans["meeting"]), track.labels, strict=True):
            assert (meeting >= 0) == label.communicates
            meetings.setdefault(meeting, set()).add(label.meeting)
    assert all(len(names) == 1 for meeting, names in meetings.items() if meeting >= 0)


def test_the_critical_path_is_that_of_explain() -> None:
    plan = plan_of("pp_dp_ep")
    timeline = simulated(plan)
    path = critical_path(Causes(plan, timeline, 1))
    found = read_report(plan, timeline)
    rows = found.head["timelines"][0]["path"]
    assert found.numbers(rows["track"]) == [part.track for part in path.segments]
    assert rows["by_kind"] == pytest.approx(path.by_kind)


@pytest.mark.parametrize("name", ["pp_dp_ep", "zero3", "zero1", "state"])
def test_memory_by_kind_and_by_tensor_is_that_of_the_ledger(name: str) -> None:
    plan = plan_of(name)
    timeline = simulated(plan)
    found = read_report(plan, timeline)
    rows = found.head["timelines"][0]
    begin, _ = timeline.steps[1]
    for row, track in zip(rows["tracks"], timeline.tracks, strict=True):
        fill_memory(plan, class_of(plan, track.ranks[0]), track)
        memory, part = row["memory"], found.head["plan"]["classes"][row["part"]]
        times = found.numbers(memory["times"])
        held = {kind: found.numbers(ref) for kind, ref in memory["held"].items()}
        planned = found.numbers(part["slots"]["planned"])
        uses = found.texts(part["slots"]["use"])
        slots, begins, ends = (found.numbers(memory[key]) for key in ("slot", "begin", "end"))
        lives = list(zip(slots, begins, ends, strict=True))
        most = [sum(column[i] for column in held.values()) for i in range(len(times))]
        assert max(most) <= memory["peak"]
        compared = 0
        for moment, (ticks, later) in enumerate(pairwise(times)):
            if later - ticks < 4:  # as clocks round
                continue
            time = begin + (ticks + later) / 2 * rows["tick"]
            for kind in CATEGORIES if moment else ():
                expected = track.memory[kind].at(time) if kind in track.memory else 0
                assert (held[kind][moment] if kind in held else 0) == expected, (kind, moment)
                compared += 1
            alive = [slot for slot, start, end in lives if start <= moment < end]
            for kind in ("parameters", "gradients", "saved", "gathered", "buffers"):
                listed = sum(planned[slot] for slot in alive if uses[slot] == kind)
                assert listed == (held[kind][moment] if kind in held else 0), (kind, moment)
        assert compared > 100


def test_bytes_between_ranks_are_what_links_carry() -> None:
    plan = plan_of("pp_dp_ep")
    columns = Columns()
    found = traffic.matrix(columns, plan)
    read = Read(columns.block({}))
    refs = (found.kind, found.source, found.target, found.nbytes)
    rows = list(zip(*(read.numbers(list(ref)) for ref in refs), strict=True))
    assert found.places == [str(rank) for rank in range(8)] and not found.by_class
    sent = sum(nbytes for kind, _, _, nbytes in rows if found.kinds[kind] == "send")
    messages = sum(
        part.slots[task.source].type.nbytes * plan.mesh.size_of(plan.mesh.free(part.slice))
        for part in plan.classes
        for task in part.tasks
        if task.kind == "send"
    )
    assert sent == messages > 0
    pairs = {(a, b) for kind, a, b, _ in rows if found.kinds[kind] == "send"}
    assert pairs == {(r, r + 4) for r in range(4)} | {(r + 4, r) for r in range(4)}
    exchanged = {(a, b) for kind, a, b, _ in rows if found.kinds[kind] == "all_to_all"}
    assert exchanged == {(r, r ^ 1) for r in range(8)}  # ep is the last axis
    talked = sum(talk.nbytes * 4 for talk in found.talks)  # four ranks a class
    assert talked == pytest.approx(sum(nbytes for *_, nbytes in rows))


def test_many_ranks_are_shown_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("pp_dp_ep")
    sums: list[dict[tuple[str, str, str], float]] = []
    for most in (256, 4):
        monkeypatch.setattr(traffic, "MOST_RANKS", most)
        columns = Columns()
        found = traffic.matrix(columns, plan)
        read = Read(columns.block({}))
        refs = (found.kind, found.source, found.target, found.nbytes)
        total: dict[tuple[str, str, str], float] = {}
        for kind, source, target, nbytes in zip(
            *(read.numbers(list(ref)) for ref in refs), strict=True
        ):
            ends = [found.places[source], found.places[target]]
            if not found.by_class:
                ends = [str(class_of(plan, int(end)).slice) for end in ends]
            key = (found.kinds[kind], *ends)
            total[key] = total.get(key, 0) + nbytes
        sums.append(total)
    assert sums[0] == pytest.approx(sums[1])


def test_the_graph_has_all_tasks_and_directives_their_effects() -> None:
    plan = plan_of("pp_dp_ep")
    head = read_report(plan, simulated(plan)).head["plan"]
    nodes, edges = head["graph"]["nodes"], head["graph"]["edges"]
    assert sum(node["num"] for node in nodes) == sum(len(part.tasks) for part in plan.classes)
    names = [node["name"] for node in nodes]
    first = next(i for i, name in enumerate(names) if name.startswith("F[PP=0"))
    assert any(source == first for source, *_ in edges)
    for edge in edges:
        kinds = nodes[edge[0]]["kind"], nodes[edge[1]]["kind"]
        if kinds[0] == "send":
            assert kinds[1] == "recv" and nodes[edge[0]]["at"] != nodes[edge[1]]["at"]
    for row, record in zip(head["directives"], plan.history, strict=True):
        assert row["code"] == str(record)
        assert row["after"] - row["before"] == record.effect.added - record.effect.removed
    split = next(row for row in head["directives"] if row["name"] == "split")
    assert split["after"] == split["before"] * plan.num_microbatches == split["added"]
    place = next(i for i, row in enumerate(head["directives"]) if row["name"] == "place")
    selected = [nodes[i]["name"] for i in head["graph"]["selected"][place]]
    assert selected and all("PP=0" in name for name in selected)


def test_shares_of_a_step_sum_up() -> None:
    timeline = simulated(plan_of("pp"))
    found = step_shares(timeline, 1)
    for shares in (found.ranks, *found.tracks):
        assert shares.computing + shares.exposed + shares.bubble == pytest.approx(1.0)
        assert min(shares.computing, shares.exposed, shares.bubble) >= 0
    for shares, use in zip(found.tracks, use_of_time(timeline, 1), strict=True):
        assert shares.computing == pytest.approx(use.computing / use.seconds)
        # A communication that waits for its peers is exposed there, and part of the bubble here.
        assert shares.exposed <= use.exposed / use.seconds + 1e-9
    assert found.ranks.exposed == pytest.approx(sum(s.exposed for s in found.tracks) / 2)


def test_names() -> None:
    assert without_microbatch("F[PP=2,MB=0]") == "F[PP=2]"
    assert without_microbatch("send>%x_4[MB=0]@pp=1") == "send>%x_4@pp=1"
    assert strategy_line(plan_of("zero3")) == "pp 2 × dp 2 × ep 2 · ZeRO-3 · 2 microbatches"


def data_of(html: str) -> Read:
    text = re.search(r'<script id="piper-data"[^>]*>([^<]*)</script>', html)
    assert text
    return Read(zlib.decompress(base64.b64decode(text[1])))


def test_a_page_needs_nothing_else() -> None:
    plan = plan_of("pp")
    html = show_html(plan, machine=machine("h100"), title='<b> & "c"')
    assert "<title>Piper: &lt;b&gt; &amp; &quot;c&quot;</title>" in html
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.search(r"(src|href)=[\"']", html.split("<script id")[0])
    head = data_of(html).head
    assert [row["source"] for row in head["timelines"]] == ["simulated"]
    assert len(head["timelines"][0]["tracks"]) == plan.mesh.size


def job_of(plan: Plan) -> Job:
    return Job(plan, {}, check_plan(plan))


def test_a_job_simulates_its_step_and_a_timeline_saves_itself(tmp_path: Path) -> None:
    job = job_of(plan_of("pp_dp_ep"))
    for by_rank in (False, True):
        found = job.simulate("h100", steps=3, by_rank=by_rank)
        expected = simulate(job.plan, machine("h100"), steps=3, by_rank=by_rank)
        assert found.steps == expected.steps and len(found.steps) == 3
        assert [list(track) for track in found.tracks] == [list(t) for t in expected.tracks]
        assert all(track.memory["parameters"].peak for track in found.tracks)
    assert job.simulate().host_computes  # of a CPU plan: on a CPU
    found.save(tmp_path / "step.timeline")
    assert load_timeline(str(tmp_path / "step.timeline")) == found
    found.save(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text() == draw_svg(found)
    with pytest.raises(FileError, match=r"what is .*step\.gif to be"):
        found.save(tmp_path / "step.gif")
    with pytest.raises(PlanError, match="steps=0"):
        job.simulate(steps=0)


@pytest.mark.parametrize("name", ["pp_dp_ep", "zero3", "state"])
def test_the_peak_is_that_of_the_summary(name: str) -> None:
    """However tasks overlap in time: their order of dispatch is known before any machine is."""
    job = job_of(plan_of(name))
    (row,) = [line for line in job.summary().splitlines() if line.startswith("peak of a rank")]
    most = max(peak.total for peak in job.report.peaks)
    assert f"  {show_size(most)}" in job.summary().partition(row)[2]
    assert read_report(job.plan, simulated(job.plan)).head["plan"]["peak"] == most
    assert f"<b>{show_size(most)}</b>" in job._repr_html_()


def test_job_show_and_notebooks(tmp_path: Path) -> None:
    job = job_of(plan_of("pp_dp_ep"))
    job.show(tmp_path / "job.html", machine="h100")
    assert data_of((tmp_path / "job.html").read_text()).head["plan"]["num_ranks"] == 8
    card = job._repr_html_()
    assert "pp 2, dp 4, ep 2" in card and "<svg" in card and len(card) < 300_000
    (page,) = re.findall(r'<iframe sandbox="allow-scripts" .*? srcdoc="([^"]*)">', card)
    assert data_of(unescape(page)).head["plan"]["num_ranks"] == 8
    assert in_place("x" * (3 << 20)) == ""
    timeline = simulated(job.plan)
    assert timeline._repr_html_().startswith("<svg")
    job.show(tmp_path / "both.html", timeline=timeline)
    names = [t["name"] for t in data_of((tmp_path / "both.html").read_text()).head["timelines"]]
    assert names == ["simulated on cpu", "the recorded step"]
    with pytest.raises(PlanError, match="ranks"):
        job.show(tmp_path / "other.html", timeline=simulated(plan_of("pp")))


@pytest.mark.parametrize(
    ("prompt", "display", "opens"), [(True, ":0", True), (True, "", False), (False, ":0", False)]
)
def test_job_show_without_a_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: bool,
    display: str,
    opens: bool,
) -> None:
    """It says where the file is; a browser opens it where somebody sits before it."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    if prompt:
        monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    job_of(plan_of("pp")).show()
    (path,) = tmp_path.glob("piper-report-*/report.html")
    assert capsys.readouterr().out == f"the report is {path}\n"
    assert data_of(path.read_text()).head["plan"]["num_ranks"] == 2
    assert opened == ([path.as_uri()] if opens else [])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan, timelines of it and of another, and one without a plan."""
    plan = plan_of("pp")
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    (tmp_path / "run.timeline").write_bytes(to_bytes(simulated(plan, by_rank=True)))
    (tmp_path / "other.timeline").write_bytes(to_bytes(simulated(plan_of("dp"))))
    (tmp_path / "alone.timeline").write_bytes(to_bytes(two_ranks()))
    return tmp_path


@pytest.mark.parametrize("finds", [True, False])
def test_where_no_browser_is_found_it_is_said_where_the_page_lies(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finds: bool
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda uri: finds)
    monkeypatch.chdir(saved)
    said = f"no browser was found here: open {saved.resolve() / 'plan.html'} in one\n"
    assert main(["show", "plan.json", "--open"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("wrote plan.html, ")
    assert printed.err == ("" if finds else said)


def test_piper_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = saved / "report.html"
    assert main(["show", f"{saved}/plan.json", f"{saved}/run.timeline", "--out", f"{out}"]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    rows = data_of(out.read_text()).head["timelines"]
    assert [row["name"] for row in rows] == ["simulated on cpu", "run.timeline"]
    assert len(rows[0]["tracks"]) == len(rows[1]["tracks"])  # both rank by rank
    assert main(["show", f"{saved}/run.timeline", "--step", "1"]) == 0
    rows = data_of((saved / "run.html").read_text()).head["timelines"]
    assert [row["step"] for row in rows] == [0]
    assert main(["show", f"{saved}/alone.timeline", "--json"]) == 0
    assert data_of((saved / "alone.html").read_text()).head["plan"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.json", "other.timeline"], "other.timeline is of plan"),
        (["plan.json", "plan.json"], "is a second plan"),
        (["plan.json", "alone.timeline"], "alone.timeline has no plan with it|is of plan"),
        (["run.timeline", "--step", "3"], "from 1 to 2"),
        (["plan.json", "--out", "report.pdf"], "FILE.html"),
        (["plan.json", "--out", "nowhere/report.html"], "there is no such folder"),
        (["missing.json"], "there is no file"),
    ],
)
def test_piper_show_refuses(
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(saved)
    assert main(["show", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
