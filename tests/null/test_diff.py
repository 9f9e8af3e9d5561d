"""diff: equal plans are equal, and what differs is said in the user's terms."""

from pathlib import Path

import msgspec
import pytest

from piper.api.job import Job
from piper.cli.main import main
from piper.errors import Call
from piper.plan.report.diff import _longest_increasing, diff
from piper.plan.types import ParamGroup
from tests.strategies import strategy_of
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("moe")


def job_of(strategy: str, schedule: str) -> Job:
    return program_of("moe").apply(strategy_of(strategy, schedule)).lower()


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of("pp2_dp2_ep2", "1f1b")


def test_equal_plans_have_no_difference(job: Job) -> None:
    again = job_of("pp2_dp2_ep2", "1f1b")
    assert job.diff(again) == ""
    program = program_of("moe").apply(strategy_of("dp2", "none"))
    assert program.diff(program) == ""


def test_the_line_of_a_directive_is_no_difference(job: Job) -> None:
    moved = [msgspec.structs.replace(r, call=Call(r.call.name)) for r in job.plan.history]
    assert diff(job.plan, msgspec.structs.replace(job.plan, history=tuple(moved))) == ""


def test_another_schedule_moves_tasks_and_costs_memory(job: Job) -> None:
    lines = job.diff(job_of("pp2_dp2_ep2", "gpipe")).splitlines()
    assert lines[:3] == [
        "directives:",
        "  - s.order(piper.schedules.schedule('1f1b', num_ranks=2, num_microbatches=2))",
        "  + s.order(piper.schedules.schedule('gpipe', num_ranks=2, num_microbatches=2))",
    ]
    assert "  moved: 4 run: F[PP=1.0,MB=1], F[PP=1.1,MB=1], F[PP=1,EP=1,MB=1] and 1 more" in lines
    assert "  peak of Values: 13.1 KiB -> 22.5 KiB" in lines
    assert not any("only in" in line for line in lines)


def test_other_degrees_change_mesh_messages_and_bytes(job: Job) -> None:
    lines = job.diff(job_of("pp2_dp2", "1f1b")).splitlines()
    for line in (
        "mesh: pp=2 dp=2 ep=2 -> pp=2 dp=2 ep=1",
        "ranks: 8 -> 4",
        "data ranks: 4 -> 2",
        "microbatches: 2 -> 4",
        "streams: only in A (1): exchange",
        "  - s.shard(where(EP='*'), over='ep')",
        "  + s.replicate(where(), over=('dp', 'ep'))",
        "  only in A: 2 read: read>F[PP=0,EP=0,MB=0], read>F[PP=0,EP=0,MB=1]",
        "  bytes of parameters: 6.3 KiB -> 9.3 KiB",
        "  all_to_all on exchange: 10 messages, 4.1 KiB -> none",
        "  send on pp=0>pp=1: 2 messages, 1.0 KiB -> 4 messages, 2.0 KiB",
        "  all_reduce on reduce: 2 messages, 6.3 KiB -> 1 message, 9.3 KiB",
        "  waits: 28 -> 14",
    ):
        assert line in lines, line


def test_a_class_that_only_one_plan_has(job: Job) -> None:
    lines = job.diff(job_of("dp2", "none")).splitlines()
    assert "mesh: pp=2 dp=2 ep=2 -> pp=1 dp=2 ep=1" in lines
    assert any(line.startswith("pp=1: only in A: ") for line in lines)


def test_everything_that_a_plan_holds_counts(job: Job) -> None:
    plan = job.plan
    one, two = ParamGroup("SGD", {"lr": 0.5}), ParamGroup("AdamW")
    num = sum(len(bucket.params) for bucket in plan.buckets)
    changes = {
        "optimizer: SGD(lr=0.1) -> SGD(lr=0.5)": {"param_groups": (one,)},
        f"optimizer: SGD(lr=0.1) -> SGD(lr=0.5) for {num} parameters; AdamW() for 0 parameters": {
            "param_groups": (one, two)
        },
        "seed: 0 -> 1": {"seed": 1},
        "device: cpu -> cuda": {"device": "cuda"},
        "tensors: only in A (1): head.weight": {
            "tensors": {k: v for k, v in plan.tensors.items() if k != "head.weight"}
        },
    }
    for line, fields in changes.items():
        assert diff(plan, msgspec.structs.replace(plan, **fields)) == line
    groups = msgspec.structs.replace(plan, groups=(*plan.groups, plan.groups[0]))
    assert "which no task shows" in diff(plan, groups)


def test_a_wait_that_is_gone_is_found(job: Job) -> None:
    first, *rest = job.plan.classes
    index = next(i for i, task in enumerate(first.tasks) if task.waits)
    tasks = list(first.tasks)
    tasks[index] = msgspec.structs.replace(tasks[index], waits=())
    changed = msgspec.structs.replace(first, tasks=tuple(tasks))
    text = diff(job.plan, msgspec.structs.replace(job.plan, classes=(changed, *rest)))
    assert f"changed: 1 {tasks[index].kind} (waits): {tasks[index].name}" in text
    assert "waits: 28 -> 27" in text


def test_longest_increasing() -> None:
    assert _longest_increasing([]) == set()
    assert len(_longest_increasing([3, 0, 1, 2])) == 3
    assert _longest_increasing([3, 0, 1, 2]) == {1, 2, 3}
    assert len(_longest_increasing([2, 1, 0])) == 1


def test_the_command(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    other = job_of("pp2_dp2_ep2", "gpipe")
    Path(a).write_bytes(job.plan.to_json())
    Path(b).write_bytes(other.plan.to_json())
    assert main(["diff", a, a]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", a, b]) == 1
    assert capsys.readouterr().out == f"A = {a}\nB = {b}\n{job.diff(other)}\n"
    assert main(["diff", a, "nothing.json"]) == 2
    assert "there is no file nothing.json" in capsys.readouterr().err
