"""Training that loses ranks goes on with those that are left, and its losses are one device's."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.errors import RankLost, RunError
from piper.strategies import parallel
from tests.procs import tiny, unhurried
from tests.procs.conftest import GetPool
from tests.procs.elastic_training import ElasticTraining, undisturbed
from tests.zoo import CASES, program_of

pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(900)]

FILE = str(Path(__file__).with_name("unhurried.py"))
LONG = bool(os.environ.get("PIPER_LONG"))


@pytest.mark.parametrize("every", [5, 10])
def test_data_that_begins_again_would_show_in_training(every: int) -> None:
    """The oracle of the tests below: batches of a start at 0, after a checkpoint."""
    steps = 3 * every
    found = undisturbed(steps, lambda number: number % (2 * every), microbatches=4)
    wanted = undisturbed(steps, microbatches=4)
    after = range(2 * every + 1, steps + 1)
    assert all(found[step] != pytest.approx(wanted[step], rel=1e-3) for step in after)


@pytest.mark.parametrize("zero", ["0", "3"])
def test_losses_of_ranks_do_not_show_in_training(tmp_path: Path, zero: str) -> None:
    kills = 15 if LONG else 2
    steps = 100 * (kills + 1)
    chance = random.Random(int(zero))
    arguments = ["--dp", "4", "--zero", zero, "--steps", str(steps), "--every", "10"]
    run = ElasticTraining(tmp_path, *arguments)
    for _ in range(kills):
        run.lose(chance)
    run.end()
    assert len(run.notes("went on")) >= kills
    assert run.notes("more ranks are there")
    found = run.losses()
    assert sorted(found) == list(range(1, steps + 1))
    assert found == pytest.approx(undisturbed(steps, microbatches=4), rel=1e-5)
    seconds = [float(text.split()[2]) for text in run.notes("went on")]
    print(f"zero {zero}: {kills} losses, went on after {min(seconds)} to {max(seconds)} s")


def test_the_last_rank_comes_back_at_once(tmp_path: Path) -> None:
    run = ElasticTraining(
        tmp_path, "--dp", "1", "--microbatches", "4", "--steps", "120", "--every", "5"
    )
    run.lose(random.Random(1))
    run.end()
    assert "with 1 of 1 ranks" in run.notes("went on")[0]
    assert run.losses() == pytest.approx(undisturbed(120, microbatches=4), rel=1e-5)


@pytest.mark.parametrize(("zero", "left"), [(0, True), (1, False), (3, False)])
def test_survivors_save_what_they_hold_if_it_is_everything(
    tmp_path: Path, zero: int, left: bool
) -> None:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(dp=2, zero=zero)).lower(optimizer=unhurried.optimizer, ema=0.5)
    batches = [tiny.batch(number) for number in range(4)]
    with job.launch("loopback") as run:
        wanted = [run.step(batch).loss for batch in batches]
    with job.launch("local") as run:
        run.workers.spare_survivors()
        found = [run.step(batch).loss for batch in batches[:2]]
        pool: Any = run.workers.pool
        os.kill(pool.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was killed") as lost:
            run.step(batches[2])
        assert (lost.value.ranks, lost.value.survivors) == ((1,), (0,))
        path = run.rescue(tmp_path / "rescued", lost.value.survivors, {})
    assert path == (tmp_path / "rescued" if left else None)
    assert (tmp_path / "rescued").exists() == left
    if path:
        with job.resume(path, "loopback") as run:
            assert run.steps == 2
            found += [run.step(batch).loss for batch in batches[2:]]
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_rank_in_the_middle_of_its_update_says_so() -> None:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(dp=2)).lower(
        optimizer=unhurried.optimizer, clip=1e-3, late_clip=True
    )
    with job.launch("loopback") as run:
        run.step(tiny.batch())
        [worker, _] = run.workers.workers
        assert worker.settled_steps() == 1
        first, *_ = worker.updaters.values()
        first.keep()  # it may take the step again
        assert worker.settled_steps() == -1
        first.settle(torch.tensor(2.0))
        assert worker.settled_steps() == 1
        first.average()  # it has taken the next step; others have not
        assert worker.settled_steps() == -1


def test_steps_of_all_shapes_count_as_done(pool: GetPool) -> None:
    """Their plans change the same buffers: one that has begun to is not done."""
    job = program_of("statistics").apply(parallel(dp=2, microbatches=2)).lower()
    batch = CASES["statistics"].batch(0)
    with job.launch(pool(2)) as run:
        run.step(batch)
        run.step({name: leaf[: len(leaf) // 2] for name, leaf in batch.items()})
        assert len(run.compiled) == 1
        assert run.workers.settled_steps([0, 1]) == {2}
    with job.launch("loopback") as run:
        worker, _ = run.workers.workers
        worker.steps.begun, worker.steps.finished, worker.steps.folded = 3, 2, 3
        assert worker.settled_steps() == -1


def test_torchrun_starts_anew_and_goes_on(tmp_path: Path) -> None:
    steps = 60
    arguments = ["--dp", "2", "--microbatches", "2", "--steps", str(steps), "--every", "5"]
    run = ElasticTraining(tmp_path, *arguments, launcher="torchrun")
    while not list((tmp_path / "run").glob("step-*5")):
        assert run.reader.is_alive(), run.errors.read_text()
        time.sleep(0.02)
    [torchrun] = [p for p in _children(run.process.pid) if "torch.distributed" in _command(p)]
    [child, *_] = [p for p in _children(torchrun) if "-m piper" in _command(p)]
    os.kill(child, signal.SIGKILL)
    run.end()
    assert run.notes("resumed from")
    found = run.losses()
    assert sorted(found) == list(range(1, steps + 1))
    assert found == pytest.approx(undisturbed(steps, microbatches=4), rel=1e-5)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_too_few_ranks_and_no_folder_are_errors() -> None:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(dp=2)).lower(optimizer=unhurried.optimizer)
    elastic = piper.Elastic(lambda ranks: job if ranks >= 2 else None, ranks=2)
    assert elastic.largest(3) is job
    with pytest.raises(RunError, match="no strategy for 1 rank"):
        elastic.largest(1)
    with pytest.raises(RunError, match="an Elastic without checkpoints"):
        piper.train(elastic, [tiny.batch()], steps=1, log="none")
    too_large = piper.Elastic(lambda ranks: job, ranks=2)
    with pytest.raises(RunError, match="the job for 1 ranks has 2"):
        too_large.largest(1)
