"""The training loop on processes: who reads what, evaluation, and what goes wrong with data."""

import time
from typing import Any

import pytest

import piper
from piper.api.job import Job
from piper.errors import RunError
from tests.heard import Heard
from tests.loopback.programs import assert_gives_nothing
from tests.procs import data
from tests.procs.conftest import GetPool
from tests.strategies import strategy_of
from tests.zoo import ADAMW, BATCH, CASES, program_of

pytestmark = pytest.mark.xdist_group("procs")

STEPS = 4


def _job(degrees: str = "pp2_ep2", **options: Any) -> Job:
    strategy = strategy_of(degrees, "dualpipev" if "pp2" in degrees else "none", **options)
    return program_of(data.NAME).apply(strategy).lower(optimizer=ADAMW, seed=3)


def _batches() -> list[Any]:
    return [CASES[data.NAME].batch(seed) for seed in range(data.NUM)]


@pytest.fixture(scope="module")
def job() -> Job:
    return _job(zero=2)


@pytest.fixture(scope="module")
def losses(job: Job) -> list[float]:
    """Read by the driver, in one process."""
    found = piper.train(job, _batches(), steps=STEPS, launch="loopback", log="none")
    assert len(set(found.losses)) == STEPS
    return found.losses


def test_ranks_that_read_their_rows_train_like_a_driver_that_reads_all(
    pool: GetPool, job: Job, losses: list[float]
) -> None:
    mine = piper.train(job, data.rows, steps=STEPS, launch=pool(4), log="none")
    together = piper.train(job, data.rows, steps=STEPS, launch="loopback", log="none")
    assert mine.losses == pytest.approx(losses, rel=1e-12)
    assert together.losses == pytest.approx(losses, rel=1e-12)


def test_a_loader_is_read_in_one_order_by_every_launcher(pool: GetPool, job: Job) -> None:
    by_driver = piper.train(job, data.loader(), steps=STEPS, launch="loopback", log="none")
    by_ranks = piper.train(job, data.loaded, steps=STEPS, launch=pool(4), log="none")
    assert by_ranks.losses == pytest.approx(by_driver.losses, rel=1e-12)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_share_of_a_loader_reads_its_samples_only(num: int) -> None:
    whole = data.loader()
    expected = list(piper.Share(0, 1, seed=5).of(whole).batch_sampler)
    read: list[list[int]] = []
    for rank in range(num):
        share = piper.Share(rank, num, seed=5)
        loader = data.loaded(share)
        found = list(loader)
        assert [len(batch["tokens"]) for batch in found] == [BATCH // num] * data.NUM
        read.append(loader.dataset.read)
    assert sorted(index for mine in read for index in mine) == list(range(data.NUM * BATCH))
    size = BATCH // num
    for number, batch in enumerate(expected):
        rows = [index for mine in read for index in mine[number * size : (number + 1) * size]]
        assert rows == batch
    assert read[0][: BATCH // num] != list(range(BATCH // num))  # it was shuffled


def test_evaluation_while_training_is_that_of_the_live_parameters(pool: GetPool, job: Job) -> None:
    kept = _batches()[-2:]
    with job.launch("loopback") as run:
        expected = []
        for batch in _batches()[:STEPS]:
            run.step(batch)
            expected.append(sum(run.evaluate(other).loss for other in kept) / 2)
    found = piper.train(
        job,
        data.rows,
        steps=STEPS,
        launch=pool(4),
        evaluate=kept,
        evaluate_every=2,
        log="none",
    )
    wanted = [
        None,
        pytest.approx(expected[1], rel=1e-12),
        None,
        pytest.approx(expected[3], rel=1e-12),
    ]
    assert [record.evaluation for record in found.records] == wanted
    read = piper.train(job, data.rows, steps=1, launch=pool(4), evaluate=data.rows, log="none")
    with job.launch("loopback") as run:
        run.step(_batches()[0])
        mean = sum(run.evaluate(batch).loss for batch in _batches()) / data.NUM
    assert read.evaluation == pytest.approx(mean, rel=1e-12)


def test_until_the_data_ends_and_no_further(pool: GetPool, job: Job) -> None:
    found = piper.train(job, data.rows, steps=None, launch=pool(4), log="none")
    assert [record.step for record in found.records] == list(range(1, data.NUM + 1))
    with pytest.raises(RunError, match=r"the data ended after 6 of 7 steps\n  legal: steps=None"):
        piper.train(job, data.rows, steps=data.NUM + 1, launch=pool(4), log="none")


def test_a_run_can_be_trained_in_parts_and_stays_open(pool: GetPool, job: Job) -> None:
    whole = piper.train(job, _batches(), steps=4, launch="loopback", log="none")
    with job.launch(pool(4)) as run:
        first = piper.train(run, _batches()[:2], steps=None, log="none")
        second = piper.train(run, _batches()[2:4], steps=None, log="none")
        assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-12)
        assert not run.closed and len(run.memory()) == 4


def test_a_function_that_processes_cannot_import_is_refused(pool: GetPool, job: Job) -> None:
    def inner(share: piper.Share) -> Any:
        return data.rows(share)

    for function, name in ((lambda share: data.rows(share), "a lambda"), (inner, "inner")):
        with pytest.raises(RunError, match=f"cannot import the data function .*{name}") as caught:
            piper.train(job, function, steps=1, launch=pool(4), log="none")
        assert caught.value.legal and "top level of a file" in caught.value.legal
    # All ranks in this process import nothing.
    piper.train(job, lambda share: data.rows(share), steps=1, launch="loopback", log="none")


def test_data_that_ends_early_on_one_rank_names_it(pool: GetPool) -> None:
    job = _job("dp2")
    with pytest.raises(RunError, match="the data of rank 1 has ended, that of rank 0 has not"):
        piper.train(job, data.uneven, steps=4, launch=pool(2), log="none")
    assert pool(2).alive


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            data.misshapen,
            r"(?s)the shares of a batch differ in their shape.*rank 1: of tokens \[14, 4\]",
        ),
        (data.broken, r"rank 1 failed in fetch: .*OSError: block 7 is damaged"),
    ],
)
def test_bad_batches_end_the_run_with_their_rank(
    pool: GetPool, function: Any, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        piper.train(_job("dp2"), function, steps=4, launch=pool(2), log="none")


def test_data_that_blocks_is_named_with_its_rank() -> None:
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        piper.train(_job("dp2"), data.blocked, steps=3, launch="local", timeout=3.0, log="none")
    line = data.blocked.__code__.co_firstlineno
    assert str(caught.value) == (
        f"rank 1 hangs in blocked (tests/procs/data.py:{line}): no batch has come for 3 s\n"
        "  legal: data that comes sooner, or launch(..., timeout=SECONDS)"
    )
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 1, "evaluate_every": 2}, "evaluate_every=2, but evaluate is missing"),
        ({"steps": 1, "evaluate": iter([])}, "the data can be read only once"),
        ({"steps": 1, "log": "loud"}, "log='loud'"),
        (
            {"steps": 1, "launch": "local", "timeuot": 3},
            "train takes no timeuot .did you mean 'timeout'",
        ),
    ],
)
def test_wrong_arguments_are_refused(job: Job, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        piper.train(job, _batches(), **options)
    with pytest.raises(RunError, match="data is int"):
        piper.train(job, 5, steps=1)


def test_a_closed_run_gives_nothing(pool: GetPool, job: Job) -> None:
    run = job.launch(pool(4))
    run.step(_batches()[0])
    run.close()
    assert_gives_nothing(run, _batches()[0])


def test_data_to_evaluate_that_processes_cannot_import_is_refused_first(
    pool: GetPool, job: Job
) -> None:
    heard = Heard()
    with pytest.raises(RunError, match="cannot import the data function a lambda"):
        piper.train(
            job,
            data.rows,
            steps=1,
            launch=pool(4),
            evaluate=lambda share: data.rows(share),
            log="none",
            callbacks=[heard],
        )
    assert [event for event, _ in heard.events] == ["failure"]
