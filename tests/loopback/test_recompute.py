"""recompute: less is saved, expensive work is not repeated, random numbers come again."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
from torch.utils.flop_counter import flop_registry

from piper.api.job import Job
from piper.api.run import Run
from piper.bodies.codec import decode
from piper.plan.summary import slot_bytes
from piper.runtime.transport.loopback import Loopback
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from piper.training.verify import compare
from tests.loopback.storages import live, unique_bytes
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("recompute")  # its jobs are made once

PIPELINES: dict[str, dict[str, Any]] = {
    "one": {"microbatches": 8},
    "gpipe": {"pp": 2, "microbatches": 8, "schedule": "gpipe"},
    "zb_h1": {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "zb_h1"},
}
KEEPS = (None, "expensive", "nothing")


@cache
def _job(name: str, pipeline: str, keep: Any) -> Job:
    strategy = parallel(**PIPELINES[pipeline], recompute=keep)
    return program_of(name).apply(strategy).lower(optimizer=ADAMW)


def _planned(job: Job) -> int:
    """Bytes of all slots that are saved from a forward to a backward."""
    names = [(s.name, slot_bytes(s)) for part in job.plan.classes for s in part.slots]
    return sum(size for name, size in names if name.startswith("$saved."))


def _measured(job: Job, name: str) -> int:
    """The most bytes, summed over ranks, of storages that only backwards still read."""
    most: dict[int, int] = defaultdict(int)

    def look(worker: Worker) -> None:
        saved = unique_bytes(live(worker, lambda slot: slot.memory == "saved"))
        most[worker.me.rank] = max(most[worker.me.rank], saved)

    run = Run(job.plan, Loopback(job.plan, job.bodies, observe=look))
    run.step(batches_of(name)[0])
    return sum(most.values())


@pytest.mark.parametrize("pipeline", ["gpipe", "zb_h1"])
def test_saved_bytes_drop_in_the_plan_and_in_memory(pipeline: str) -> None:
    planned = [_planned(_job("moe", pipeline, keep)) for keep in KEEPS]
    measured = [_measured(_job("moe", pipeline, keep), "moe") for keep in KEEPS]
    assert planned[0] > planned[1] > planned[2] == 0
    assert measured[0] > measured[1] > measured[2]
    if pipeline == "gpipe":  # a BI hands on to BW what it has computed again
        assert measured[2] < 0.6 * measured[0]


@pytest.mark.parametrize("name", ["dense", "moe", "tied", "dropout"])
def test_under_nothing_a_forward_hands_out_its_outputs_alone(name: str) -> None:
    """And a backward reads its forward's inputs: it makes everything else itself."""
    job = _job(name, "zb_h1" if name != "dense" else "gpipe", "nothing")
    for node in job.graph.chunks:
        if node.phase == "F":
            values = [job.graph.values[value] for value in node.outputs]
            assert all(v.role in ("activation", "loss", "count") for v in values), node.name
        else:
            forward = job.graph.nodes[node.forward]
            made = set(forward.outputs)
            assert not made & set(node.inputs), node.name


def _products(job: Job, phase: str) -> int:
    """Matrix products and attention of all bodies of a phase."""
    ours = ("piper::grouped_mm", "piper::grouped_mm_weight")
    total = 0
    for node in job.graph.chunks:
        if node.phase == phase:
            for called in decode(job.bodies[node.body]).graph.nodes:
                packet = getattr(called.target, "overloadpacket", None)
                name = str(getattr(packet, "_qualified_op_name", ""))
                total += packet in flop_registry or name in ours or "attention" in name
    return total


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_expensive_work_is_kept_and_not_repeated(name: str) -> None:
    counts = {keep: _products(_job(name, "one", keep), "B") for keep in KEEPS}
    assert counts["expensive"] == counts[None] > 0
    assert counts["nothing"] > counts[None]
    forward = {_products(_job(name, "one", keep), "F") for keep in KEEPS}
    assert len(forward) == 1


@pytest.mark.parametrize("keep", ["expensive", "nothing"])
@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_randomness_is_replayed(pipeline: str, keep: str) -> None:
    """Dropout in the backward's forward drops what it dropped before."""
    job = _job("dropout", pipeline, keep)
    with job.launch("loopback", adversary=True, seed=4) as run:
        errors = compare(run, batches_of("dropout"), reference_of("dropout", job))
    assert errors.exact, errors


def test_other_random_numbers_in_a_backward_would_be_seen() -> None:
    """With keys of another step in all backwards, gradients come out otherwise."""
    job = _job("dropout", "one", "nothing")
    with job.launch("loopback") as run:
        (worker,) = run.workers.workers  # type: ignore[attr-defined]
        keys = {i for i, slot in enumerate(worker.me.slots) if slot.kind == "key"}
        spoilt = 0
        for index, task in enumerate(worker.me.tasks):
            if getattr(task, "phase", "") == "B" and keys & set(task.reads):
                worker.starts[index] = _spoiling(
                    worker, keys & set(task.reads), worker.starts[index]
                )
                spoilt += 1
        assert spoilt
        errors = compare(run, batches_of("dropout"), reference_of("dropout", job))
    assert errors.gradient > 1e-3


def _spoiling(worker: Worker, keys: set[int], start: Any) -> Any:
    def spoilt() -> Any:
        for slot in keys:
            worker.slots[slot] = worker.slots[slot] + 1
        return start()

    return spoilt
