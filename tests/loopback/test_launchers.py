"""One protocol of launchers: a command to all ranks is one method of Member."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from piper.errors import RunError
from piper.runtime.launch.in_process import InProcessPool
from piper.runtime.launch.launchers import LAUNCHERS
from piper.runtime.launch.loopback_pool import LoopbackPool
from piper.runtime.launch.member import Member
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of


@pytest.mark.parametrize(("launcher", "degrees"), [("loopback", "dp2"), ("single", "one")])
def test_a_new_command_is_one_method(
    launcher: str, degrees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps_done(member: Member, times: int) -> tuple[int, int]:
        return member.rank, times * member.workers["train"].steps.begun

    monkeypatch.setattr(Member, "steps_done", steps_done, raising=False)
    job = program_of("dense").apply(strategy_of(degrees, "none")).lower(optimizer=ADAMW)
    with job.launch(launcher) as run:
        run.step(batches_of("dense")[0])
        answers = run.workers.call("steps_done", 10)
    assert answers == [(rank, 10) for rank in range(job.plan.mesh.size)]


def test_every_launcher_calls_in_the_same_way() -> None:
    for name, launcher in LAUNCHERS.items():
        kind: Any = launcher.pool
        assert list(inspect.signature(kind.call).parameters) == ["self", "command", "payloads"], (
            name
        )
        assert kind.reading in ("driver", "members", "rank") and kind.sends in (True, False)
        taken = inspect.signature(kind).parameters
        assert set(launcher.options) | {"num_ranks", "device"} <= set(taken), name
        assert ("mesh" in taken) == launcher.by_mesh


def test_a_pool_in_this_process_runs_many_plans_and_stays() -> None:
    pool: InProcessPool = LoopbackPool(2, adversary=True, seed=3)
    jobs = [
        program_of(name).apply(strategy_of("dp2", "none", zero=zero)).lower(optimizer=ADAMW)
        for name, zero in (("dense", 0), ("tied", 3))
    ]
    for name, job in zip(("dense", "tied"), jobs, strict=True):
        batch = batches_of(name)[0]
        with job.launch("loopback") as own:
            wanted = own.step(batch).loss
        with job.launch(pool) as run:
            assert run.step(batch).loss == pytest.approx(wanted, rel=1e-12)
        assert pool.members
    pool.close()
    with pytest.raises(RunError, match="the pool is closed"):
        jobs[0].launch(pool)
