"""Metrics beside the loss: those of one device under every strategy, and training as it was."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.bodies.leaves import map_leaves
from piper.errors import AxisError, TraceError
from piper.frontend.capture.step_results import loss_and_metrics
from piper.plan.tasks import Comm
from piper.strategies import parallel
from piper.training.line import Log, step_text
from piper.training.mean_results import Mean
from piper.training.verify import compare, load_initial, train_one_device
from tests import tensor_zoo, zoo
from tests.zoo import ADAMW

# Model, degrees, schedule.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("moe", {"dp": 2, "ep": 2, "zero": 2, "microbatches": 4}),
    ("counted", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb_h1", "microbatches": 4}),
    ("deep_moe", {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "dualpipev", "microbatches": 4}),
    ("untagged", {"pp": 4, "schedule": "1f1b", "microbatches": 8}),
    ("deep", {"pp": 2, "schedule": "interleaved_1f1b", "recompute": "nothing", "microbatches": 8}),
]  # fmt: skip
TENSOR_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("fused", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}),
    ("counted", {"cp": 2, "dp": 2, "zero": 3, "microbatches": 2}),
    ("rms", {"tp": 2, "cp": 2}),
]


def _measured(case: Any) -> Any:
    """The step of a case with metrics: a mean, a pair, one of parameters and a number of Python."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits, labels = model(batch).flatten(0, 1), batch["labels"].flatten()
        loss = case.step(_Known(logits.view(*batch["labels"].shape, -1)), batch)
        right, kept = logits.argmax(-1) == labels, labels > 2
        return loss, {
            "accuracy": right.double().mean(),
            "of kept": ((right & kept).sum(), kept.sum()),
            "spread": logits.std(),
            "bias": next(iter(model.parameters())).abs().sum(),
            "rows": batch["labels"].shape[0],
        }

    return step


class _Known:
    """A model whose result is known."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, batch: Any) -> Tensor:
        return self.logits


def _of_one_device(job: piper.Job, model: nn.Module, batch: Any) -> dict[str, float]:
    """By the user's own step on the global microbatches."""
    pieces = job.plan.num_data_ranks * job.plan.num_microbatches
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for piece in range(pieces):
            rows = map_leaves(lambda leaf, piece=piece: leaf.chunk(pieces)[piece], batch)
            _, metrics = loss_and_metrics(job.source.step(model, rows))
            for name, made in metrics.items():
                total, count = made if isinstance(made, tuple) else (made, 1)
                known = sums.setdefault(name, [0.0, 0.0])
                known[0] += float(total)
                known[1] += float(count)
    return {name: total / count for name, (total, count) in sums.items()}


def _check(case: Any, degrees: dict[str, Any], adversary: bool) -> None:
    batches = [case.batch(seed) for seed in range(3)]
    program = piper.trace(case.model, batches[0], _measured(case)).apply(parallel(**degrees))
    job = program.lower(optimizer=ADAMW)
    model = case.model()
    load_initial(model, job)
    for launch in range(2):
        with job.launch("loopback", adversary=adversary, seed=launch) as run:
            evaluated = run.evaluate(batches[1]).metrics
            trained = run.step(batches[0]).metrics
            model.eval()
            assert evaluated == pytest.approx(_of_one_device(job, model, batches[1]), rel=1e-10)
            model.train()
            assert trained == pytest.approx(_of_one_device(job, model, batches[0]), rel=1e-10)
            assert list(trained) == ["accuracy", "of kept", "spread", "bias", "rows"]
    plain = piper.trace(case.model, batches[0], case.step).apply(parallel(**degrees))
    with plain.lower(optimizer=ADAMW).launch("loopback") as without:
        for batch in batches:
            without.step(batch)
        known = without.parameters()
    with job.launch("loopback") as run:
        for batch in batches:
            run.step(batch)
        assert all(torch.equal(known[name], param) for name, param in run.parameters().items())


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize(("name", "degrees"), ROWS)
def test_metrics_are_those_of_one_device_and_change_no_bit_of_training(
    name: str, degrees: dict[str, Any], adversary: bool
) -> None:
    _check(zoo.CASES[name], degrees, adversary)


@pytest.mark.parametrize(("name", "degrees"), TENSOR_ROWS)
def test_so_they_are_where_tensors_are_cut(name: str, degrees: dict[str, Any]) -> None:
    _check(tensor_zoo.CASES[name], degrees, adversary=False)


def _of_parameters(case: Any) -> Any:
    """The step of a case with metrics of parameters, each read where the loss is made."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss = case.step(model, batch)
        norms = {name: p.norm() for name, p in model.named_parameters() if p.ndim > 1}
        return loss, norms

    return step


@pytest.mark.parametrize(
    "degrees",
    [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "sp": True},
     {"pp": 2, "tp": 2, "dp": 2, "zero": 2}],
    ids=str,
)  # fmt: skip
def test_metrics_may_read_parameters_that_are_cut_in_another_stage(degrees: dict[str, Any]) -> None:
    """They give no gradient: it does not matter which other code reads a parameter, and how."""
    case = tensor_zoo.CASES["fused"]
    batch = case.batch(0)
    program = piper.trace(case.model, batch, _of_parameters(case)).apply(parallel(**degrees))
    job, model = program.lower(optimizer=ADAMW), case.model()
    load_initial(model, job)
    with job.launch("loopback") as run:
        found = run.step(batch).metrics
        gradients = run.gradients()
    assert found == pytest.approx(_of_one_device(job, model, batch), rel=1e-10)
    plain = piper.trace(case.model, batch, case.step).apply(parallel(**degrees))
    with plain.lower(optimizer=ADAMW).launch("loopback") as run:
        run.step(batch)
        for name, gradient in run.gradients().items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_a_metric_that_zero_3_cannot_gather_for_is_named() -> None:
    case = tensor_zoo.CASES["fused"]
    strategy = parallel(pp=2, tp=2, dp=2, zero=3)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss, norms = _of_parameters(case)(model, batch)
        return loss, dict([next(iter(norms.items()))])

    program = piper.trace(case.model, case.batch(0), step).apply(strategy)
    name = r"replicate \(tests/.*.py:\d+\): F\[.*\], which makes metrics \((.*)\), reads \1 whole"
    with pytest.raises(AxisError, match=name):
        program.lower()


class _Stages(nn.Module):
    """Two stages; the first gives a figure of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with piper.annotate("PP"):
            x = self.first(x).tanh()
            figure = x.abs().mean()
        with piper.annotate("PP"):
            return self.head(x), figure


BATCH = {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4), "y": torch.arange(8) % 3}


def _figured(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits, figure = model(batch["x"])
    loss = nn.functional.cross_entropy(logits, batch["y"])
    return loss, {"figure": figure, "none": (logits.sum() * 0, (batch["y"] > 5).sum())}


def _figures(**degrees: Any) -> piper.Job:
    return piper.trace(_Stages, BATCH, _figured).apply(parallel(**degrees)).lower()


def test_a_metric_lives_where_it_is_made() -> None:
    plan = _figures(pp=2, microbatches=2).plan
    sent = [
        task.name
        for rank_class in plan.classes
        for task in rank_class.tasks
        if isinstance(task, Comm) and task.kind == "send"
    ]
    # One activation and one gradient for each microbatch, and no figure.
    assert len(sent) == 4
    first = [task.name for task in plan.classes[0].tasks]
    assert sum("add>" in name and "[MB=" in name for name in first) == 2


def test_a_metric_that_counts_nothing_is_no_number() -> None:
    with _figures(dp=2).launch("loopback") as run:
        result = run.step(BATCH)
    assert result.metrics["none"] != result.metrics["none"]
    assert result.metric_counts == {"figure": 2.0, "none": 0.0}
    mean = Mean()
    mean.add(result)
    assert mean.metrics["figure"] == result.metrics["figure"]
    assert mean.metrics["none"] != mean.metrics["none"]


def test_metrics_stand_in_records_lines_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    training = piper.train(
        _figures(pp=2, dp=2, microbatches=2), [BATCH] * 3, steps=3, launch="loopback",
        evaluate=[BATCH, BATCH], log="json",
    )  # fmt: skip
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    figures = [record.metrics["figure"] for record in training.records]
    assert [event["metrics"] for event in steps] == [{"figure": f, "none": "nan"} for f in figures]
    last = training.records[-1]
    [evaluation] = [event for event in events if event["event"] == "evaluation"]
    assert evaluation["metrics"] == {"figure": last.evaluation_metrics["figure"], "none": "nan"}
    assert f"loss {last.loss:.4f}  figure {figures[-1]:.4g}  none nan  lr" in step_text(
        last, 3, None, unit="rows"
    )
    out = io.StringIO()
    Log("text", out=out).evaluation(last, 2, 0.1)
    assert (
        f"loss {last.evaluation:.4f}, figure {last.evaluation_metrics['figure']:.4g}"
        in out.getvalue()
    )


def test_mean_batch_keeps_metrics() -> None:
    program = piper.trace(_Stages, BATCH, _figured, mean="batch").apply(parallel(dp=2))
    with program.lower().launch("loopback") as run:
        assert run.step(BATCH).count == 8.0
        assert set(run.evaluate(BATCH).metrics) == {"figure", "none"}


def test_a_saved_job_reports_them_too(tmp_path: Any) -> None:
    job = _figures(pp=2, microbatches=2)
    job.save(tmp_path / "job.json")
    with (
        job.launch("loopback") as one,
        piper.load_job(tmp_path / "job.json").launch("loopback") as other,
    ):
        known = one.step(BATCH).metrics["figure"]
        assert other.step(BATCH).metrics["figure"] == known


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (lambda y, b: {"a": y}, "each a mean or a pair (sum, count): a"),
        (lambda y, b: {"a": (y.sum(), 2, 3)}, "each a mean or a pair (sum, count): a"),
        (lambda y, b: {1: y.sum()}, "each a mean or a pair (sum, count): 1"),
        (lambda y, b: {"a": "text"}, "each a mean or a pair (sum, count): a"),
        (lambda y, b: {"one two": torch.ones(())}, "'one two' depends on neither the batch nor"),
    ],
)
def test_metrics_that_are_none_are_refused(metrics: Any, words: str) -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits, _ = model(batch["x"])
        return logits.sum(), metrics(logits, batch)

    with pytest.raises(TraceError) as caught:
        piper.trace(_Stages, BATCH, step)
    assert words in str(caught.value)


def test_a_model_with_metrics_is_verified_like_others() -> None:
    job = piper.trace(_Stages, BATCH, _figured).apply(parallel(pp=2, microbatches=4))
    job = job.lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        assert compare(run, [BATCH] * 3, train_one_device(job, [BATCH] * 3)).exact
