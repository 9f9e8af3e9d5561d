"""Explaining and comparing timelines: what is planted is named, what is asked wrongly is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from piper.cli.main import main
from piper.cost.machine import Link, Machine
from piper.insight.causes import Causes
from piper.insight.memory_peak import largest_total, memory_peak
from piper.insight.memory_remedies import plan_peak, possible_remedies, tried_remedies
from piper.insight.step_text import show_seconds
from piper.insight.task_spans import task_spans
from piper.insight.timeline_diff import WAITING, timeline_diff
from piper.insight.what_if import what_if, what_if_replayed
from piper.observe.timeline import Timeline
from piper.observe.timeline_files import load_timeline
from piper.observe.timeline_output import save_timeline
from piper.plan.report.track_memory import fill_memory
from piper.plan.types import Plan, class_of, plan_from_json
from piper.sim.disturbances import Disturbance, Jitter, SlowBody, SlowLink, SlowRank
from piper.sim.measured_costs import MeasuredCosts, TypicalCosts, replayed
from piper.sim.simulate import simulate
from piper.strategies import parallel
from tests.null.test_simulate import layers_plan
from tests.zoo import program_of

EXAMPLES = Path(__file__).parents[2] / "examples"
DEGREES = ["--pp", "2", "--dp", "2", "--schedule", "gpipe", "--microbatches", "4"]


def _machine(**changes: Any) -> Machine:
    link = Link(2e-6, 1e11, share=0.1)
    values: dict[str, Any] = {
        "name": "test", "flops": {"float32": 1e12}, "bandwidth": 1e12, "node": link, "network": link,
        "ranks_per_node": 8, "launch": 1e-5, "dispatch": 1e-6, "exchange": 1e-6,
    }  # fmt: skip
    return Machine(**{**values, **changes})


def _simulated(plan: Plan, *disturbances: Disturbance, steps: int = 2, **changes: Any) -> Timeline:
    found = simulate(plan, _machine(**changes), steps=steps, disturbances=disturbances)
    for track in found.tracks:
        fill_memory(plan, class_of(plan, track.ranks[0]), track)
    return found


# What if, from what tasks took


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"pp": 2, "dp": 2, "zero": 2}, {"dp": 3, "zero": 3}]
)
def test_a_timeline_is_replayed_as_it_was(degrees: dict, host_computes: bool) -> None:
    """Streams that share a device, and communication beside computation, are in what tasks took."""
    plan = layers_plan(4, 4, **degrees)
    for by_rank in (False, True):
        machine = _machine(host_computes=host_computes)
        timeline = simulate(plan, machine, steps=2, by_rank=by_rank)
        again = replayed(plan, timeline, MeasuredCosts(plan, timeline, timeline.settled))
        assert again.step_seconds[0] == pytest.approx(timeline.step_seconds[1], rel=0.01)


@pytest.mark.parametrize("host_computes", [False, True])
def test_a_recording_and_a_machine_agree_on_what_would_help(host_computes: bool) -> None:
    plan = layers_plan(4, 4, pp=2, dp=2)
    machine = _machine(host_computes=host_computes)
    timeline = simulate(plan, machine, steps=2)
    for name, factor in (("all_reduce", 0.0), ("F", 0.5), ("B[PP=1", 2.0)):
        wanted = what_if(plan, machine, name, factor)
        found = what_if_replayed(plan, timeline, name, factor)
        assert found.recorded == timeline.step_seconds[1] and found.off < 0.01
        assert found.gain == pytest.approx(wanted.gain, abs=0.05), name
        assert found.tasks == wanted.tasks > 0


def test_what_each_step_took_is_replayed_by_itself() -> None:
    """With noise, the usual times of tasks give a step that is shorter than every one of them."""
    plan = layers_plan(4, 8, pp=4)
    timeline = simulate(plan, _machine(), steps=6, disturbances=[Jitter(0.5)])
    timeline.source = "measured"
    found = what_if_replayed(plan, timeline, "F")
    assert found.off < 0.02
    usual = replayed(plan, timeline, MeasuredCosts(plan, timeline, timeline.settled))
    assert usual.step_seconds[0] < min(timeline.step_seconds)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (SlowRank(2, 1.6), "rank 2 takes 1."),
        (SlowLink((1, 3), 8.0), "the link of ranks 1-3 takes"),
    ],
)
def test_slow_ranks_and_links_stand_out_beside_their_like(planted: Any, said: str) -> None:
    from piper.insight.suspects import suspects

    plan = layers_plan(4, 8, pp=2, dp=2)
    timeline = simulate(plan, _machine(), disturbances=[planted, Jitter(0.03)])
    usual = TypicalCosts(MeasuredCosts(plan, timeline, timeline.settled))
    found = suspects(Causes(plan, timeline), Causes(plan, replayed(plan, timeline, usual)))
    assert str(found[0]).startswith(said), list(map(str, found))


# Tasks


def test_a_task_says_what_it_waited_for_and_who_for_it() -> None:
    plan = layers_plan(4, 4, pp=4)
    causes = Causes(plan, _simulated(plan))
    (span,) = task_spans(causes, "F[PP=2,MB=0]")
    assert span.track == "pp=2" and span.begin == span.came
    assert [link.task.startswith("recv") for link in span.waited_for] == [True]
    assert [link.task.startswith("send") for link in span.followed_by] == [True]
    (receive,) = task_spans(causes, span.waited_for[0].task)
    assert receive.came < receive.begin  # the rank is there, the message is not
    (peer,) = [link for link in receive.waited_for if link.why == "peer"]
    assert peer.track == "pp=1" and peer.task.startswith("send")
    (sent,) = task_spans(causes, peer.task)
    assert [link.task for link in sent.followed_by if link.why == "peer"] == [receive.task]


# Memory


def test_the_peak_is_that_of_the_checker_and_names_what_is_alive() -> None:
    plan = layers_plan(4, 8, pp=2, schedule="gpipe")
    timeline = _simulated(plan, host_computes=True)
    causes = Causes(plan, timeline)
    for number, track in enumerate(timeline.tracks):
        peak = memory_peak(causes, number)
        assert peak.nbytes == plan_peak(plan, track.ranks[0]) == largest_total(track)
        assert sum(peak.by_category.values()) == peak.nbytes
        assert causes.begin <= peak.time <= causes.end
        for alive in peak.largest:
            assert alive.nbytes <= peak.by_category[alive.category]
            assert bool(alive.task) == bool(alive.directive)
    saved = [alive for alive in peak.largest if alive.category == "saved"]
    assert not saved or saved[0].task.startswith("F[")


@functools.cache
def _dense() -> tuple[Any, Any]:
    program = program_of("dense")
    return program, program.apply(parallel(pp=2, dp=2, schedule="gpipe", microbatches=2))


def test_directives_are_tried_and_their_difference_is_the_plans() -> None:
    program, applied = _dense()
    plan = applied.lower().plan
    found = tried_remedies(plan, lambda records: program.apply(records).lower().plan)
    done = {remedy.directives: remedy for remedy in found if not remedy.refused}
    words = " ".join(text for texts in done for text in texts)
    for part in (
        "zero=1",
        "recompute(where()) ",
        "keep='expensive'",
        "'MB', 4",
        "num_microbatches=4",
    ):
        assert part in words, words
    for texts, remedy in done.items():
        assert remedy.saves == plan_peak(plan) - remedy.peak
        if texts == ("s.recompute(where())",):
            less = parallel(
                pp=2, dp=2, schedule="gpipe", microbatches=2, recompute="nothing"
            )  # fmt: skip
            assert remedy.peak == plan_peak(program.apply(less).lower().plan)
            assert remedy.saves > 0
    assert [r.saves for r in found if not r.refused] == sorted(
        (r.saves for r in found if not r.refused), reverse=True
    )


def test_a_leaner_schedule_is_tried_where_microbatches_pile_up() -> None:
    plan = layers_plan(4, 8, pp=4, schedule="gpipe")
    lean = layers_plan(4, 8, pp=4, schedule="1f1b")
    from piper.insight.memory_remedies import candidates

    orders = [texts[0] for texts, _ in candidates(plan) if "order" in texts[0]]
    assert len(orders) == 1 and "gpipe" not in orders[0] and "num_microbatches=8" in orders[0]
    # 1F1B holds as few as any schedule of one stage a rank: there is nothing better to try.
    same = [texts for texts, _ in candidates(lean) if "num_microbatches=8" in texts[0]]
    assert same == []
    assert plan_peak(lean) < plan_peak(plan)


def test_without_a_program_the_plan_says_what_could_go_at_most() -> None:
    plan = layers_plan(4, 4, dp=2)
    held = {"saved": 100, "parameters": 80, "optimizer": 10, "inside": 5}
    found = possible_remedies(plan, held)
    assert [(r.saves, r.tried) for r in found] == [(100, False), (40, False), (5, False)]
    assert "recompute" in found[0].directives[0] and "zero=3" in found[1].directives[0]
    cut = layers_plan(4, 4, dp=2, zero=3)
    assert [r.saves for r in possible_remedies(cut, held)] == [100]


# Two timelines


def test_a_planted_difference_comes_first() -> None:
    plan = layers_plan(4, 4, pp=2, dp=2)
    a, b = _simulated(plan, Jitter(1e-6)), _simulated(plan, SlowBody("B[PP=1,", 3.0))
    found = timeline_diff(a, b)
    assert found.same_plan and found.by_body == ()
    rows = [row for row in found.by_kind if row.name != WAITING]
    assert rows[0].name == "B" and rows[0].count == (16.0, 16.0)
    assert {row.name.split(",MB")[0] for row in found.by_task[:4]} == {"B[PP=1"}
    assert found.by_task[0].usual[1] == pytest.approx(3 * found.by_task[0].usual[0], rel=0.1)
    assert found.by_directive[0].name == "s.place(where(PP=1), mesh.at(pp=1))"
    assert {row.rank for row in found.by_rank} == {0, 1, 2, 3}
    assert all(row.peak[0] == row.peak[1] > 0 for row in found.by_rank)


def test_two_plans_are_matched_by_what_their_tasks_do() -> None:
    a = _simulated(layers_plan(4, 4, pp=2, dp=2))
    b = _simulated(layers_plan(4, 4, pp=2, dp=2, zero=1), Jitter(1e-6))
    found = timeline_diff(a, b)
    assert not found.same_plan and found.by_task == ()
    counts = {row.name: row.count for row in found.by_kind}
    assert counts["F"] == (16.0, 16.0)  # a class's track stands for all of its ranks
    assert counts["all_gather"][0] == 0 < counts["all_gather"][1]
    bodies = {row.name for row in found.by_body}
    assert {"F[PP=0]", "B[PP=1]"} <= bodies and not any("MB=" in name for name in bodies)
    assert len(found.by_rank) == 4


# The command line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("timelines")
    dense, plan = str(EXAMPLES / "dense.py"), str(home / "plan.json")
    assert main(["plan", dense, *DEGREES, "-o", plan]) == 0
    for name, more in (
        ("run.timeline", []),
        ("run.json", []),
        ("slow.timeline", ["--slow-rank", "2:2"]),
    ):
        assert main(["simulate", plan, "-o", str(home / name), *more]) == 0
    assert main(["plan", dense, "--dp", "2", "-o", str(home / "other.json")]) == 0
    (home / "notes.txt").write_text("no plan at all\n")
    bare = load_timeline(home / "run.timeline")
    bare.plan_json = b""
    save_timeline(bare, home / "bare.timeline")
    return home


def _explained(
    capsys: pytest.CaptureFixture[str], home: Path, *words: str, code: int = 0
) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["explain", *[str(home / w) if (home / w).exists() else w for w in words]]) == code
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_a_timeline_has_its_plan_with_it(files: Path) -> None:
    for name in ("run.timeline", "run.json"):
        timeline = load_timeline(files / name)
        assert plan_from_json(timeline.plan_json).content_hash() == timeline.plan


@pytest.mark.parametrize("name", ["run.timeline", "run.json"])
def test_where_a_step_goes(files: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _explained(capsys, files, name)
    for part in ("critical path", "by directive", "largest gaps", "suspects", "which needs"):
        assert part in out
    out, _ = _explained(capsys, files, name, "--json")
    facts = json.loads(out)
    assert sum(facts["critical_path"]["by_kind"].values()) == pytest.approx(facts["seconds"])
    assert facts["gaps"][0]["chain"] and facts["suspects"] == []


def test_what_the_compiler_expects_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, dense = tmp_path / "expected.timeline", str(EXAMPLES / "dense.py")
    command = ["simulate", dense, *DEGREES, "--machine", "h100", "--expected"]
    assert main([*command, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    expected = load_timeline(path)
    assert out.startswith("machine H100") and f"wrote {path}" in out
    assert f"expected step: {show_seconds(expected.step_seconds[0])}" in out
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step_seconds"] == expected.step_seconds and facts["machine"]["name"] == "H100"
    assert main(["simulate", *command[1:-1], "-o", str(tmp_path / "run.timeline")]) == 0
    assert main(["diff", str(path), str(tmp_path / "run.timeline")]) == 1
    assert main([*command, "--jitter", "0.1"]) == 2
    assert "--expected and --jitter" in capsys.readouterr().err
    assert main(["simulate", "plan.json", "--expected"]) == 2
    assert "has its order already" in capsys.readouterr().err


def test_a_slow_rank_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _explained(capsys, files, "slow.timeline")
    assert "rank 2 takes 2.00 x as long as it should" in out
    out, _ = _explained(capsys, files, "slow.timeline", "--machine", "cpu")
    assert "held to what was predicted" in out and "rank 2 takes 2.00 x" in out


def test_questions_of_a_timeline(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _explained(capsys, files, "run.timeline", "--at", "2:0.01")
    assert out.startswith("pp=1 computes nothing from 0.000 to ")
    assert "which needs F[PP=1,MB=0] on pp=0" in out
    out, _ = _explained(capsys, files, "run.timeline", "--task", "F[PP=0,MB=0]", "--json")
    facts = json.loads(out)
    middle = (facts["spans"][0]["begin"] + facts["spans"][0]["end"]) / 2 - facts["begin"]
    out, _ = _explained(capsys, files, "run.timeline", "--at", f"0:{middle * 1e3}")
    assert out.startswith("pp=0 is not idle then: F[PP=0,MB=0] runs from ")
    out, _ = _explained(capsys, files, "run.timeline", "--task", "F[PP=2,MB=0]")
    assert out.startswith("F[PP=2,MB=0] on pp=1 (run on stream compute, s.place(")
    out, _ = _explained(capsys, files, "run.timeline", "--path")
    assert len(out.splitlines()) > 10 and "F[PP=0,MB=0]" in out
    path, _ = _explained(capsys, files, "run.timeline")
    out, _ = _explained(capsys, files, "run.timeline", "--what-if", "B=0", "--what-if", "send=2")
    lines = out.splitlines()
    assert lines[0].startswith("replayed") and "free the step is" in lines[1] and len(lines) == 3
    (listed, *_) = (line.partition("%  ")[2] for line in path.splitlines() if "  s.place(" in line)
    changed = [
        _explained(capsys, files, "run.timeline", "--what-if", f"{text}=0.5")[0].replace(text, "")
        for text in (listed, listed.removeprefix("s."))
    ]
    assert changed[0] == changed[1] and "0.5 x as long" in changed[0]
    for number, others in (("1", ["--step", "1"]), ("2", ["--step", "2"]), ("2", [])):
        asked = ["--what-if", "B=0", *others, "--json"]
        facts = json.loads(_explained(capsys, files, "run.timeline", *asked)[0])
        assert facts["what_if_steps"] == [int(number)]
        seconds = load_timeline(files / "run.timeline").step_seconds[int(number) - 1]
        assert facts["what_if"][0]["recorded"] == seconds
    out, _ = _explained(capsys, files, "run.timeline", "--memory", "3")
    assert out.startswith("pp=1 holds most at ") and 'recompute(where(...), keep="nothing")' in out
    for more in (["--at", "2:0.01"], ["--task", "F[PP=1,MB=0]"], ["--path"], ["--memory"],
                 ["--what-if", "B=0"]):  # fmt: skip
        out, _ = _explained(capsys, files, "run.timeline", *more, "--json")
        assert len(json.loads(out)) > 3


def test_the_plan_may_stand_behind_options(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = _explained(capsys, files, "run.timeline", "plan.json", "--path")
    behind, _ = _explained(capsys, files, "run.timeline", "--path", "plan.json")
    assert before == behind
    for more, words in (
        (["plan.json", "other.json"], "plan.json other.json: there is no place for it"),
        (["--paht"], "no option --paht (did you mean '--path'?)"),
    ):
        with pytest.raises(SystemExit):
            _explained(capsys, files, "run.timeline", "--path", *more)
        assert words in capsys.readouterr().err.replace(str(files) + "/", "")


def test_any_option_of_a_machine_predicts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--network", "infiniband-ndr"], ["--ranks-per-node", "1"]):
        out, _ = _explained(capsys, files, "run.timeline", *more)
        assert "suspects, held to what was predicted" in out


def test_simulation_refuses_what_it_would_not_heed(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(files / "plan.json")
    for more, said in (
        (["--pp", "4"], "--pp does not go with a saved plan"),
        (["--clip", "1"], "--clip does not go with a saved plan"),
        (["-o", "no/where.svg"], "no/where.svg cannot be written: there is no such folder as no"),
        (["-o", "where.png"], "what is where.png to be?"),
    ):
        capsys.readouterr()
        assert main(["simulate", plan, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["simulate", plan, "--machine", "cpu", "--jitter", "0.1", "--seed", "1"]) == 0


def test_profile_refuses_files_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both, folder = str(tmp_path / "both.json"), tmp_path / "folder.json"
    folder.mkdir()
    for more, said in (
        (["--record", both, "--predicted", both], "one file for several"),
        (["--out", both, "--predicted", both], "one file for several"),
        (["--record", "/nowhere/a.json"], "there is no such folder as /nowhere"),
        (["--out", "/nowhere/a.json"], "there is no such folder as /nowhere"),
        (["--record", str(folder)], "it is a folder"),
    ):
        assert main(["profile", "no.py", *more]) == 2
        assert said in capsys.readouterr().err


def test_directives_are_tried_on_the_program(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = str(EXAMPLES / "dense.py")
    out, _ = _explained(capsys, files, "run.timeline", dense, *DEGREES, "--memory", "--json")
    remedies = json.loads(out)["remedies"]
    plan = plan_from_json(load_timeline(files / "run.timeline").plan_json)
    assert len(remedies) >= 4 and all(remedy["tried"] for remedy in remedies)
    assert remedies[0]["saves"] == plan_peak(plan) - remedies[0]["peak"] > 0
    assert any("1f1b" in remedy["directives"][0] for remedy in remedies)
    out, _ = _explained(capsys, files, "run.timeline", dense, *DEGREES, "--memory")
    assert "tried, each alone" in out and remedies[0]["directives"][0] in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["notes.txt"], "FileError: notes.txt is neither a plan nor a timeline\n  legal: what"),
        (["run.timeline", "other.json"], "PlanError: run.timeline is of plan"),
        (["bare.timeline"], "FileError: bare.timeline has no plan with it\n  legal: bare.timel"),
        (["run.timeline", "--at", "1:1e6"], "FileError: 1e+06 ms is not in the step\n  legal: fr"),
        (["run.timeline", "--at", "9:1"], "FileError: the timeline has no rank 9\n  legal: 0 to 3"),
        (["run.timeline", "--at", "now"], "OptionError: --at now is not understood\n  legal: RANK"),
        (["run.timeline", "--memory", "9"], "FileError: the timeline has no rank 9"),
        (["run.timeline", "--memory", "x"], "OptionError: --memory x is no rank"),
        (["run.timeline", "--step", "3"], "OptionError: --step 3\n  legal: from 1 to 2"),
        (["run.timeline", "--task", "F[PP=9"], "PlanError: no task is called 'F[PP=9'"),
        (["run.timeline", "--what-if", "al_reduce=0"], "did you mean 'all_reduce'?"),
        (["run.timeline", "--what-if", "all_reduce"], "--what-if all_reduce is not understood"),
        (["run.timeline", "--what-if", "F=-1"], "--what-if F=-1 is not understood"),
        (["run.timeline", "--pp", "2"], "OptionError: --pp without FILE.py"),
        (["plan.json", "--path"], "OptionError: --path, but plan.json is a plan"),
        (["plan.json"], "FileError: which task of plan.json?"),
        (["nothing.timeline"], "FileError: there is no file nothing.timeline"),
    ],
)
def test_what_is_asked_wrongly_is_one_error(
    words: list[str],
    error: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    capsys.readouterr()
    assert main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err and error in printed.err


def test_another_plan_says_what_differs(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    assert main(["explain", "run.timeline", "other.json"]) == 2
    assert "directives:" in capsys.readouterr().err


def test_diff_of_timelines(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    capsys.readouterr()
    assert main(["diff", "run.timeline", "run.json"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", "run.timeline", "slow.timeline"]) == 1
    out = capsys.readouterr().out
    assert "step: " in out and "by kind" in out and "by task" in out and "rank 2: computes" in out
    assert main(["diff", "run.timeline", "slow.timeline", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["same_plan"] and facts["by_rank"][0]["rank"] == 2
    assert main(["diff", "plan.json", "other.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"]
    assert main(["diff", "run.timeline", "plan.json"]) == 2
    assert "run.timeline is a timeline, plan.json a plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.25 s"), (0.9996, "1 s"), (0.9994, "999 ms"), (8.1e-6, "8.1 µs"), (1234.0, "1234 s")],
)
def test_seconds_are_shown_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
