"""Evaluation: the loss of the eager module in eval() mode, under the strategy, on live parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.check import check_plan
from piper.errors import CheckError, PlanError, RunError, TraceError
from piper.frontend.capture.capture import plain_name
from piper.runtime.transport.loopback import LoopbackTransport
from piper.runtime.worker.weights import initial_value
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from tests.float32_mode import Float32Mode
from tests.heard import Heard
from tests.zoo import ADAMW, CASES, batches_of, program_of

# Models x ZeRO x schedules: every level with several of the others.
GRID: list[tuple[str, dict[str, Any]]] = [
    ("deep_dense", {"pp": 2, "dp": 2, "schedule": "1f1b"}),
    ("deep_dense", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zbv"}),
    ("deep_dense", {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b", "bucket_size": 300}),
    ("deep_moe", {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "zbv"}),
    ("deep_moe", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "1f1b"}),
    ("deep_moe", {"pp": 2, "dp": 4, "ep": 2, "zero": 3, "schedule": "dualpipev"}),
    ("deep_dropout", {"pp": 2, "dp": 2, "ep": 2, "schedule": "zbv"}),
    ("deep_dropout", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "dualpipev"}),
    ("deep_dropout", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zbv", "bucket_size": 300}),
    ("deep", {"pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b", "recompute": "nothing"}),
    ("counted", {"pp": 2, "dp": 2, "ep": 2, "schedule": "1f1b"}),
    ("counted", {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b"}),
    ("untagged", {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b"}),
]


def _named(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *(f"{key}{value}" for key, value in case[1].items())))


def _job(name: str, options: dict[str, Any], **lowering: Any) -> Job:
    strategy = parallel(microbatches=4, **options)
    return program_of(name).apply(strategy).lower(optimizer=ADAMW, **lowering)


def _eager(job: Job, parameters: dict[str, Tensor], batch: Any) -> float:
    """The user's own module in eval() mode, on the global microbatches."""
    plan, source = job.plan, job.source
    model = source.make_model().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(parameters[plain_name(name)])
        pieces = plan.num_data_ranks * plan.num_microbatches
        total = count = 0.0
        for piece in range(pieces):
            result = source.step(model, {k: v.chunk(pieces)[piece] for k, v in batch.items()})
            loss, weight = result if isinstance(result, tuple) else (result, 1.0)
            total, count = total + float(loss), count + float(weight)
    return total / count


@pytest.mark.parametrize(("name", "options"), GRID, ids=map(_named, GRID))
def test_the_loss_is_that_of_the_module_in_eval_mode(name: str, options: dict[str, Any]) -> None:
    job = _job(name, options)
    first, second, held_out = batches_of(name)
    with job.launch("loopback", adversary=True, seed=1) as run:
        before = run.evaluate(held_out)
        for batch in (first, second):
            run.step(batch)
        after = run.evaluate(held_out)
        wanted = _eager(job, run.parameters(), held_out)
        assert run.evaluate(held_out) == after
    assert after.loss == pytest.approx(wanted, rel=1e-10) and after.norm is None
    assert after.loss != before.loss


EVERY_STEP = [GRID[2], GRID[7], GRID[8], GRID[9]]


@pytest.mark.parametrize(("name", "options"), EVERY_STEP, ids=map(_named, EVERY_STEP))
def test_evaluating_changes_nothing(name: str, options: dict[str, Any]) -> None:
    """Training with an evaluation after every step is bit-equal to training without, also in what
    random operations draw."""
    job = _job(name, options, clip=0.5)
    trained = []
    for evaluates in (False, True):
        losses = []
        with job.launch("loopback") as run:
            for batch in batches_of(name):
                losses.append(run.step(batch).loss)
                if evaluates:
                    run.evaluate(batch)
            trained.append((losses, run.parameters(), run.gradients()))
    (losses, params, grads), (other_losses, other_params, other_grads) = trained
    assert losses == other_losses
    assert all(torch.equal(params[k], other_params[k]) for k in params)
    assert all(torch.equal(grads[k], other_grads[k]) for k in grads)


def test_an_evaluation_has_forwards_only() -> None:
    job = _job(*GRID[7])
    evaluation = job.evaluation()
    assert job.evaluation() is evaluation and not evaluation.plan.train
    tasks = [task for found in evaluation.plan.classes for task in found.tasks]
    kinds = {task.kind for task in tasks}
    assert {task.phase for task in tasks if task.kind == "run"} == {"F"}
    assert not kinds & {"update", "settle", "norm", "reduce_scatter"}
    slots = {slot.kind for found in evaluation.plan.classes for slot in found.slots}
    assert not slots & {"grad", "key"}
    assert all(
        peak.by_category["saved"] == peak.by_category["gradients"] == 0
        for peak in evaluation.report.peaks
    )
    with pytest.raises(PlanError, match="is an evaluation itself"):
        evaluation.evaluation()


def test_parameters_are_shared_not_copied() -> None:
    for options in ({"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}):
        job = _job("dense", options)
        with job.launch("loopback") as run:
            run.evaluate(batches_of("dense")[0])
            for member in run.workers.pool.members:  # type: ignore[attr-defined]
                mine, other = member.workers["eval"], member.workers["train"]
                held = {s.name: i for i, s in enumerate(other.me.slots)}
                shared = [
                    (mine.slots[i], other.slots[held[s.name]])
                    for i, s in enumerate(mine.me.slots)
                    if s.kind in ("param", "flat", "shard") and s.base < 0
                ]
                assert shared and all(a is b for a, b in shared)


def test_one_rank_on_its_device() -> None:
    job = _job("dropout", {})
    first, second, _ = batches_of("dropout")
    with job.launch("single") as run:
        run.step(first)
        assert run.evaluate(second).loss == pytest.approx(
            _eager(job, run.parameters(), second), rel=1e-10
        )
    with pytest.raises(RunError, match="closed"):
        run.evaluate(second)


def test_bfloat16_is_evaluated_in_bfloat16() -> None:
    case = CASES["dense"]
    program = piper.trace(case.make_model, case.batch(0), case.step)
    job = program.apply(parallel(pp=2, dp=2, zero=2)).lower(optimizer=ADAMW, precision="bf16")
    with job.launch("loopback") as run:
        run.step(case.batch(0))
        found = run.evaluate(case.batch(1))
        parameters = run.parameters()
    model = case.make_model().bfloat16()
    rows = [{k: v.chunk(2)[piece] for k, v in case.batch(1).items()} for piece in range(2)]
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(parameters[plain_name(name)])
        with Float32Mode():
            wanted = [float(case.step(model.eval(), part)) for part in rows]
    assert found.loss == sum(wanted) / 2


def test_plans_that_do_not_fit_share_nothing() -> None:
    one, other = _job("dense", {"dp": 2}), _job("dense", {"dp": 2, "zero": 3})
    transport = LoopbackTransport()
    worker = Worker(one.plan, 0, bodies=one.bodies, transport=transport)
    evaluation = other.evaluation()
    with pytest.raises(RunError, match=r"shared with has none"):
        Worker(evaluation.plan, 0, bodies=evaluation.bodies, transport=transport, shares=worker)


def test_an_evaluation_that_trains_is_refused() -> None:
    """The mark on the plan does not hide updates."""
    plan = msgspec.structs.replace(_job("dense", {"dp": 2}).plan, train=False)
    with pytest.raises(CheckError, match="has no place in an evaluation"):
        check_plan(plan)


def test_a_training_plan_without_updates_is_refused() -> None:
    plan = msgspec.structs.replace(_job("dense", {"dp": 2}).evaluation().plan, train=True)
    with pytest.raises(CheckError, match="is updated never"):
        check_plan(plan)


class _Other(nn.Module):
    """Another program in eval() mode than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 4 if self.training else 2]:
            with piper.annotate("PP"):
                x = layer(x)
        return x


@cache
def _other() -> Program:
    return piper.trace(_Other, {"x": torch.randn(4, 4)}, lambda m, b: F.mse_loss(m(b["x"]), b["x"]))


class OnlyInEval(nn.Module):
    """`scale`, a buffer or a parameter, is read in eval() mode alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if kind == "buffer":
            self.register_buffer("scale", torch.rand(4))
        else:
            self.scale = nn.Parameter(torch.rand(4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.linear(batch["x"])
        return x if self.training else x * self.scale


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_only_an_evaluation_reads_is_as_it_was_made(kind: str, zero: int) -> None:
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    program = piper.trace(
        lambda: OnlyInEval(kind).double(), batch, lambda m, b: m(b).square().mean()
    )
    job = program.apply(parallel(dp=2, zero=zero)).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        scale = job.evaluation().plan.tensors["scale"]
        value = initial_value(scale, job.evaluation().bodies, seed=job.plan.seed)
        for _ in range(2):
            run.step(batch)
        parameters = {"scale": value, **run.parameters()}
        wanted = (
            F.linear(batch["x"], parameters["linear.weight"], parameters["linear.bias"]) * value
        )
        assert run.evaluate(batch).loss == pytest.approx(float(wanted.square().mean()), rel=1e-12)


def test_a_model_that_is_another_one_in_eval_mode_is_refused() -> None:
    job = _other().lower()
    with pytest.raises(TraceError, match=r"structure is another one in eval\(\) mode") as refused:
        job.evaluation()
    assert "test_evaluation.py" in str(refused.value)


@pytest.mark.parametrize("launcher", ["loopback", "single"])
def test_a_model_that_cannot_be_evaluated_is_refused_before_the_first_step(launcher: str) -> None:
    heard = Heard()
    batch = {"x": torch.randn(4, 4)}
    with pytest.raises(TraceError, match=r"structure is another one in eval\(\) mode"):
        piper.train(
            _other().lower(),
            [batch],
            steps=1,
            launch=launcher,
            evaluate=[batch],
            log="none",
            callbacks=[heard],
        )
    assert [event for event, _ in heard.events] == ["failure"]


def test_a_batch_norm_that_keeps_its_statistics_trains_and_is_evaluated() -> None:
    """In eval() mode it changes nothing, whatever it does in training."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
        model[1].eval()
        return model

    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = {"x": x}
    program = piper.trace(make, batch, lambda model, batch: model(batch["x"]).square().mean())
    job = program.apply(parallel(dp=2, microbatches=2)).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        run.step(batch)
        assert abs(run.evaluate(batch).loss - _eager(job, run.parameters(), batch)) < 1e-12


def test_state_that_only_an_evaluation_changes_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(6, 6), nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                self.seen.add_(1)
            return self.layer(x)

    program = piper.trace(Counting, torch.ones(8, 6), lambda model, x: model(x).square().mean())
    with pytest.raises(TraceError, match=r"buffer seen is changed in place \(.*test_evaluation"):
        program.lower().evaluation()
