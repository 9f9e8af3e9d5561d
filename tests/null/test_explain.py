"""explain: what is said of a task is what the plan and its graph say."""

from pathlib import Path

import msgspec
import pytest

import piper
from piper.api.job import Job
from piper.cli.main import main
from piper.errors import PlanError
from piper.plan.report.explain import explain
from piper.plan.report.summary import alive_bytes, peak_bytes
from tests.strategies import strategy_of
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("moe")


@pytest.fixture(scope="module")
def job() -> Job:
    return program_of("moe").apply(strategy_of("pp2_dp2_ep2", "1f1b")).lower()


def test_a_chunk(job: Job) -> None:
    lines = job.explain("F[PP=0.2,MB=0]").splitlines()
    assert lines[:3] == [
        "F[PP=0.2,MB=0]",
        f"  kind     run on stream compute, task 7 of {len(job.plan.classes[0].tasks)}",
        "  class    pp=0 (ranks 0-3)",
    ]
    assert lines[3].startswith("  from     s.place(where(PP=0), mesh.at(pp=0))  (")
    assert "test_explain.py:" in lines[3]
    assert "  reads    %zeros_like[MB=0]  temp float64[8,8]  512 B" in lines
    assert "           stages.0.mlp.weight@pp=0  param float64[8,8]  512 B" in lines
    assert "  writes   %x_3[MB=0]  temp float64[2,4,8]  512 B" in lines
    assert (
        "  after    F[PP=0,EP=0,MB=0]>%rows_1[MB=0] (exchange): reads its result %rows_1[MB=0]"
        in lines
    )
    assert "           F[PP=0,EP=0,MB=0] (compute): before it on its stream" in lines
    assert "           F[PP=0.0,MB=1] (compute): next on its stream" in lines
    assert "  before   send>%x_3[MB=0]@pp=1 (pp=0>pp=1): reads its result %x_3[MB=0]" in lines


def test_a_message_names_its_peers_and_its_other_end(job: Job) -> None:
    lines = job.explain("send>%x_3[MB=0]@pp=1").splitlines()
    assert "  from     s.place(where(PP=1), mesh.at(pp=1))" in lines[3]
    assert "  group    pp=0|pp=1 over -: ranks 0 -> 4 | 1 -> 5 | 2 -> 6 | 3 -> 7" in lines
    assert "  key      %x_3[MB=0]@pp=1" in lines
    assert "  meets    recv>%x_3[MB=0]@pp=1 at pp=1, task 0 there" in lines


def test_what_has_no_directive_and_what_the_host_reads(job: Job) -> None:
    total = job.explain("total.loss@pp=0")
    assert "from     the traced program; no directive made it" in total
    assert "group    pp=0|pp=1 over dp,ep: ranks 0-7" in total
    rows = job.explain("rows0>F[PP=0,EP=0,MB=1]")
    assert "group    pp=0 over ep: ranks 0,1 | 2,3" in rows
    assert "float64[8,8] (at most 16 rows)  1.0 KiB" in rows
    assert "no wait: the host dispatches nothing before it has read" in rows


def test_every_wait_has_a_reason_of_its_own(job: Job) -> None:
    """A plan with no order between streams has no wait for the sake of an order."""
    for found in job.plan.classes:
        for task in found.tasks:
            text = job.explain(task.name)
            assert "an order asks for it" not in text
            for wait in task.waits:
                assert f" {found.tasks[wait].name} (" in text


def test_an_order_of_communication_is_named() -> None:
    plan = program_of("moe").apply(strategy_of("dp2", "none")).lower().plan
    (found,) = plan.classes
    tasks = list(found.tasks)
    reduce = next(i for i, task in enumerate(tasks) if task.kind == "all_reduce")
    tasks[reduce] = msgspec.structs.replace(tasks[reduce], waits=(0,))
    changed = msgspec.structs.replace(found, tasks=tuple(tasks))
    text = explain(msgspec.structs.replace(plan, classes=(changed,)), tasks[reduce].name)
    assert f"{tasks[0].name} (compute): an order asks for it" in text


def test_bytes_alive_follow_from_one_task_to_the_next(job: Job) -> None:
    for found in job.plan.classes:
        steps = list(alive_bytes(found))
        assert len(steps) == len(found.tasks) and steps[0][0] == 0
        assert [after for *_, after in steps[:-1]] == [before for before, *_ in steps[1:]]
        assert max(during for _, during, _ in steps) == peak_bytes(found)


def test_an_overlap_shows_the_interleaving(job: Job) -> None:
    first, *rest = job.plan.classes
    number = {task.name: index for index, task in enumerate(first.tasks)}
    turns = [number[f"F[PP=0.1,MB={i}]"] for i in (0, 1)]
    changed = msgspec.structs.replace(first, overlaps=((0, 1), tuple(turns)))
    plan = msgspec.structs.replace(job.plan, classes=(changed, *rest))
    text = explain(plan, "F[PP=0.1,MB=0]")
    assert "  overlap  F[PP=0.1,MB=0]\n           F[PP=0.1,MB=1]\n" in text
    assert "overlap" not in explain(plan, "total.loss@pp=0")
    assert "overlap" not in job.explain("F[PP=0.2,MB=0]")
    assert b"overlaps" not in job.plan.to_json()


def test_names_by_their_start_or_end(job: Job) -> None:
    assert job.explain("read>F[PP=0,EP=0,MB=1").startswith("read>F[PP=0,EP=0,MB=1]\n")
    assert job.explain("0t0>BI[PP=0,EP=0,MB=1]").startswith("rows0t0>BI[PP=0,EP=0,MB=1]\n")
    with pytest.raises(PlanError, match=r"did you mean 'F\[PP=0.0,MB=1\]'"):
        job.explain("F[PP=0.0,MB=9]")
    with pytest.raises(PlanError, match=r"4 tasks are called update\.\.\.\n    update"):
        job.explain("update")
    with pytest.raises(PlanError, match="no task is called ''"):
        job.explain("")


def test_a_name_on_several_classes_is_shown_for_each(job: Job) -> None:
    other = msgspec.structs.replace(job.plan.classes[0], slice=piper.Mesh((("pp", 2),)).at(pp=1))
    plan = msgspec.structs.replace(job.plan, classes=(job.plan.classes[0], other))
    text = explain(plan, "F[PP=0.1,MB=0]")
    assert text.count("\n  class    ") == 2
    assert "class    pp=0 (ranks 0-3)" in text and "class    pp=1 (ranks 4-7)" in text


def test_the_command(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(job.plan.to_json())
    assert main(["explain", str(path), "total.loss@pp=1"]) == 0
    assert capsys.readouterr().out == job.explain("total.loss@pp=1") + "\n"
    assert main(["explain", str(path), "total.lost@pp=1"]) == 2
    assert "did you mean 'total.loss@pp=1'?" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.json"), "x"]) == 2
    assert "there is no file" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["explain", str(path), "x"]) == 2
    assert "plan.json: not a Piper plan" in capsys.readouterr().err
