"""What no strategy may change, beyond parity in float64."""

from __future__ import annotations

import pytest
import torch

import piper
from piper.plan.slots import SUMS
from piper.training.verify import compare, relative_error, train, train_one_device
from tests.matrix import CELLS, MODEL, Cell, covering
from tests.strategies import strategy_of
from tests.zoo import CASES, batches_of, program_of


def _single_precision(name: str) -> piper.Program:
    case = CASES[name]
    return piper.trace(case.make_model, case.batch(0), case.step)


def test_law_1_float32_is_bit_equal_where_additions_have_the_same_order() -> None:
    """Pipelines add a parameter's gradients in the order of microbatches, like one device."""
    program = _single_precision("dense")
    job = program.apply(strategy_of("pp2", "1f1b")).lower(optimizer=piper.sgd(lr=0.1))
    reference = train_one_device(job, batches_of("dense"))
    with job.launch("loopback", adversary=True) as run:
        found = train(run, batches_of("dense"))
    assert found.losses == pytest.approx(reference.losses, rel=1e-6)
    for mine, other in zip(found.gradients, reference.gradients, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)
    assert all(torch.equal(found.parameters[n], p) for n, p in reference.parameters.items())


def test_law_1_float32_is_close_where_additions_differ() -> None:
    program = _single_precision("moe")
    job = program.apply(strategy_of("pp2_dp2_ep2", "gpipe")).lower(optimizer=piper.sgd(lr=0.1))
    reference = train_one_device(job, batches_of("moe"))
    with job.launch("loopback") as run:
        found = train(run, batches_of("moe"))
    for mine, other in zip(found.gradients, reference.gradients, strict=True):
        assert max(relative_error(mine[name], other[name]) for name in other) <= 1e-6


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=pytest.mark.xdist_group(Cell(0, "none", "copied", m).program))
        for m in MODEL
    ],
)
def test_law_2_every_parameter_is_updated_once_on_every_rank_that_has_it(model: str) -> None:
    for cell in (cell for cell in covering(CELLS) if cell.model == model):
        plan = cell.job().plan
        trained = [name for name, tensor in plan.tensors.items() if tensor.trainable]
        in_buckets = [name for bucket in plan.buckets for name in bucket.params]
        assert sorted(in_buckets) == sorted(trained), cell.name
        for part in plan.classes:
            here = [i for i, bucket in enumerate(plan.buckets) if part.slice in bucket.slices]
            updated = [task.bucket for task in part.tasks if task.kind == "update"]
            assert sorted(updated) == here, cell.name


def test_values_are_freed_within_a_step() -> None:
    job = program_of("moe").apply(strategy_of("pp2_ep2", "1f1b")).lower()
    with job.launch("loopback") as run:
        run.step(batches_of("moe")[0])
        for worker in run.workers.workers:
            kept = [
                slot.name
                for slot, value in zip(worker.me.slots, worker.slots, strict=True)
                if value is not None and slot.kind in ("temp", "batch", "host", *SUMS)
            ]
            assert all(name.startswith(("$loss@", "$sum.loss@")) for name in kept), kept


def test_silence_about_order_is_filled_in() -> None:
    """Without any order, list scheduling gives a plan that trains exactly."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2, dp=2)
        for stage in range(2):
            s.place(piper.where(PP=stage), mesh.at(pp=stage))
        s.replicate(piper.where(), over="dp")
        s.split(piper.where(), "MB", 4)

    job = program_of("dense").apply(strategy).lower(optimizer=piper.adamw(lr=1e-2))
    reference = train_one_device(job, batches_of("dense"))
    with job.launch("loopback", adversary=True) as run:
        assert compare(run, batches_of("dense"), reference).exact


def test_two_directions_through_one_pipeline() -> None:
    """Half of the microbatches enter at each end, so that every stage lives on two slices."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2)
        s.split(piper.where(), "DIR", 2)
        s.split(piper.where(), "MB", 2)
        for direction in range(2):
            for stage in range(2):
                at = mesh.at(pp=stage if direction == 0 else 1 - stage)
                s.place(piper.where(PP=stage, DIR=direction), at)

    job = program_of("tied").apply(strategy).lower(optimizer=piper.adamw(lr=1e-2))
    reference = train_one_device(job, batches_of("tied"))
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary) as run:
            assert compare(run, batches_of("tied"), reference).exact


def test_a_count_may_be_a_number() -> None:
    """It is the number of one microbatch, whatever the size of the example batch."""
    case = CASES["dense"]

    def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return case.step(model, batch) * batch["labels"].numel(), batch["labels"].numel()

    program = piper.trace(case.model, case.batch(0), step)
    job = program.apply(strategy_of("pp2_dp2", "1f1b")).lower(optimizer=piper.adamw(lr=1e-2))
    with job.launch("loopback") as run:
        assert run.step(case.batch(0)).count == case.batch(0)["labels"].numel()
    reference = train_one_device(job, batches_of("dense"))
    with job.launch("loopback", adversary=True) as run:
        assert compare(run, batches_of("dense"), reference).exact
