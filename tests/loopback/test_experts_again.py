"""recompute of layers with sharded experts: rows travel again, a layer keeps its input, all is exact."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import piper
from piper import where
from piper.api.job import Job
from piper.api.run import Run
from piper.check.parties import compressed
from piper.errors import CheckError
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.tasks import Comm
from piper.plan.tasks import Run as Task
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests import tensor_zoo, zoo
from tests.loopback.pools import loopback
from tests.loopback.storages import unique_bytes
from tests.zoo import ADAMW, BATCH, EXPERTS, LENGTH, WIDTH

pytestmark = pytest.mark.xdist_group("experts_again")

ROWS: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    (zoo, "moe", {"dp": 2, "ep": 2, "microbatches": 4}, {"clip": 0.1}),
    (zoo, "untagged", {"dp": 4, "ep": 4, "microbatches": 2}, {}),
    (zoo, "untagged", {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "microbatches": 4}, {}),
    (zoo, "moe", {"dp": 2, "ep": 2, "zero": 3, "microbatches": 2},
     {"clip": 0.1, "late_clip": True}),
    (zoo, "counted", {"dp": 2, "ep": 2, "zero": 1, "microbatches": 4},
     {"clip": 0.1, "late_clip": True}),
    (zoo, "skip", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    (zoo, "branches", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    (zoo, "integers", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4}, {}),
    (zoo, "dropout", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "microbatches": 4, "schedule": "zb_h2"},
     {}),
    (zoo, "deep", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "zbv"}, {}),
    (zoo, "deep_dropout", {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "microbatches": 4,
                           "schedule": "dualpipev"}, {}),
    (zoo, "deep", {"pp": 2, "dp": 4, "ep": 2, "microbatches": 2, "schedule": "interleaved_1f1b"},
     {}),
    (zoo, "deep", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipe"}, {}),
    (tensor_zoo, "mixture", {"dp": 2, "ep": 2, "microbatches": 2}, {"clip": 0.1}),
    (tensor_zoo, "mixture", {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2}, {}),
    (tensor_zoo, "mixture", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "1f1b"},
     {}),
    (tensor_zoo, "mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4, "zero": 3}, {}),
    (tensor_zoo, "experts", {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2}, {}),
    (tensor_zoo, "experts", {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 2, "zero": 2,
                             "microbatches": 4, "schedule": "zb_h1"}, {}),
    (tensor_zoo, "mixture", {"cp": 2, "dp": 2, "ep": 2, "microbatches": 2}, {}),
    (tensor_zoo, "deep_mixture", {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 2, "zero": 1,
                                  "microbatches": 4, "schedule": "dualpipev"}, {}),
]  # fmt: skip


def _name(row: tuple[Any, str, dict[str, Any], dict[str, Any]]) -> str:
    _, model, degrees, more = row
    return "-".join([model, *(f"{k}{v}" for k, v in (*degrees.items(), *more.items()))])


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_trains_like_one_device(
    row: tuple[Any, str, dict[str, Any], dict[str, Any]], adversary: bool
) -> None:
    models, name, degrees, more = row
    strategy = parallel(**degrees, recompute="nothing")
    job = models.program_of(name).apply(strategy).lower(optimizer=ADAMW, **more)
    assert bool(_sent_again(job)) == ("ep" in degrees)  # else each rank has a part of every expert
    batches = models.batches_of(name)
    # Those of the models know of no clipping.
    reference = train_one_device(job, batches) if more else models.reference_of(name, job)
    with job.launch("loopback", adversary=adversary, seed=len(_name(row))) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


def _comms(job: Job) -> list[Comm]:
    return [task for part in job.plan.classes for task in part.tasks if isinstance(task, Comm)]


def _sent_again(job: Job) -> list[Comm]:
    """Rows on their way to experts a second time, and back."""
    return [task for task in _comms(job) if task.comm == "all_to_all" and "~again" in task.name]


@cache
def _job(layers: int, keep: str, selector: str = "all") -> Job:
    """All layers in one stage, experts on two ranks."""
    case = zoo.CASES["moe"]
    program = piper.trace(
        lambda: zoo.Untagged(num_stages=layers).double(), case.batch(0), case.step
    )

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(ep=2)
        s.place(where(), mesh.at())
        s.replicate(where(EP=None), over="ep")
        s.shard(where(EP="*"), over="ep", max_load=1)
        s.recompute({"all": where(), "dense": where(EP=None)}[selector], keep=keep)

    return program.apply(strategy).lower(optimizer=ADAMW)


def _planned(job: Job) -> int:
    """Bytes of what is saved when the last forward is over."""
    world = compressed(job.plan)
    (party,) = world.distinct
    ledger = MemoryLedger(world.plan, world.local(party))
    saved = 0
    for index, task in enumerate(party.tasks):
        ledger.start(index)
        ledger.end(index)
        if isinstance(task, Task) and task.phase == "F":
            saved = ledger.held["saved"]
    return saved


def _measured(job: Job) -> int:
    """The most bytes of storages that one forward after another has left to backwards, on rank 0."""
    (part,) = job.plan.classes
    forwards = [task for task in part.tasks if isinstance(task, Task) and task.phase == "F"]
    left = {slot for task in forwards for slot in (*task.inputs, *task.outputs)}
    most = 0

    def look(worker: Worker) -> None:
        nonlocal most
        if worker.me.rank == 0:
            slots = (worker.slots[slot] for slot in left if worker.use[slot] == "saved")
            most = max(most, unique_bytes([each for each in slots if isinstance(each, Tensor)]))

    Run(job.plan, loopback(job.plan, job.bodies, observe=look)).step(zoo.CASES["moe"].batch(0))
    return most


ACTIVATION = BATCH // 2 * LENGTH * WIDTH * 8
COUNTS = EXPERTS * 8  # of the rows that a rank's experts got


def test_a_layer_keeps_its_input_and_its_counts() -> None:
    """Rows that were sent and rows that came back are neither kept nor counted; pieces keep them."""
    planned = {layers: _planned(_job(layers, "nothing")) for layers in (2, 4)}
    assert planned[4] - planned[2] == 2 * (ACTIVATION + COUNTS)
    assert _planned(_job(4, "pieces")) > 3 * planned[4]
    assert _measured(_job(4, "nothing")) - _measured(_job(2, "nothing")) <= 2 * (
        ACTIVATION + COUNTS
    )


def test_rows_travel_again_and_counts_do_not() -> None:
    """There and back, per layer; a step that keeps pieces has neither, and as many flops."""
    kept, again = _job(4, "pieces"), _job(4, "nothing")
    more = Counter(task.comm for task in _comms(again)) - Counter(t.comm for t in _comms(kept))
    assert more == {"all_to_all": 2 * 4}
    assert len(_sent_again(again)) == 2 * 4 and not _sent_again(kept)
    assert not [task for task in _comms(again) if "counts" in task.name and "~again" in task.name]
    assert again.plan.flops == kept.plan.flops


def test_experts_that_keep_all_get_their_rows_once() -> None:
    job = _job(2, "nothing", "dense")
    assert not _sent_again(job)


def test_previews_foresee_no_less() -> None:
    program = zoo.program_of("deep_moe").apply(
        parallel(pp=2, dp=2, ep=2, microbatches=4, recompute="nothing")
    )
    foreseen: Counter[str] = Counter()
    for line in program.foreseen():
        foreseen.update(dict(line.comms))
    real = Counter(task.comm for task in _comms(program.lower(optimizer=ADAMW)))
    assert real <= foreseen


def test_evaluation_shares_what_training_keeps() -> None:
    """Its chunks are cut as those of training are, and nothing runs again."""
    case = zoo.CASES["untagged"]
    strategy = parallel(dp=2, ep=2, zero=3, microbatches=2, recompute="nothing")
    job = zoo.program_of("untagged").apply(strategy).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        before = run.evaluate(case.batch(0)).loss
        assert before == pytest.approx(float(run.step(case.batch(0)).loss), rel=1e-12)


def test_a_layer_between_which_something_is_kept_is_cut_in_two() -> None:
    """Its backward would wait for what it keeps, which waits for what runs again."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(ep=2)
        s.place(where(), mesh.at())
        s.replicate(where(EP=None), over="ep")
        s.shard(where(EP="*"), over="ep")
        s.split(where(), "MB", 4)
        s.recompute(where(EP=None))
        s.recompute(where(EP=1))

    job = zoo.program_of("untagged").apply(strategy).lower(optimizer=ADAMW)
    assert len(_sent_again(job)) == 2 * 4
    reference = train_one_device(job, zoo.batches_of("untagged"))
    with job.launch("loopback", adversary=True, seed=2) as run:
        errors = compare(run, zoo.batches_of("untagged"), reference)
    assert errors.exact, errors


def test_a_limit_that_refuses_says_what_layers_that_run_again_would_spare() -> None:
    """What it computes again by itself leaves layers with experts whole."""
    program = zoo.program_of("moe").apply(parallel(dp=2, ep=2, microbatches=2))
    with pytest.raises(CheckError, match="limit") as refused:
        program.lower(optimizer=ADAMW, memory_limit=1000)
    assert "recompute(where()), which runs whole layers again" in str(refused.value)
