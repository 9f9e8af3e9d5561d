"""torch.autocast in a model or a step: its casts, forward and backward, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device

WIDTH = 16
# Casts and operators are the same, so only additions of microbatches and ranks, in float32, may differ.
BOUND = 1e-6


def _batch(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Layers(nn.Module):
    """Each weight is used twice in an autocast; an island of float32 in it; dropout."""

    def __init__(
        self, autocast: Callable[[], Any] = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            for start in (0, 2):
                with piper.annotate("PP"):
                    for layer in range(start, start + 2):
                        linear = self.linears[layer]
                        x = x + torch.tanh(linear(torch.relu(linear(self.norms[layer](x)))))
                        with torch.autocast("cpu", enabled=False):
                            x = F.dropout(x.float(), 0.1, self.training) * 1.5
        return x


def _job(make: Callable[[], nn.Module], step: Any = _mean_square, **options: Any) -> Job:
    program = piper.trace(make, _batch(0), step).apply(parallel(microbatches=2, **options))
    return program.lower(optimizer=piper.adamw(lr=1e-2))


def _check(job: Job, *, bound: float = BOUND) -> None:
    batches = [_batch(seed) for seed in range(3)]
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, reference)
    assert errors.loss <= BOUND, errors
    assert max(errors.gradient, errors.parameter) <= bound, errors
    assert not errors.differing_replicas


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2},
        {"dp": 2},
        {"dp": 2, "zero": 3},
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb_h1"},
        {"pp": 2, "recompute": "nothing"},
        {"pp": 2, "recompute": "expensive", "schedule": "zb_h1"},
    ],
    ids=lambda options: "-".join(f"{key}{value}" for key, value in options.items()),
)
def test_training_is_that_of_one_device(options: dict[str, Any]) -> None:
    # On one data rank all additions have one order: every bit of every gradient agrees.
    _check(_job(Layers, **options), bound=BOUND if "dp" in options else 0.0)


def test_casts_are_in_the_bodies_and_change_the_numbers() -> None:
    plain = _job(lambda: Layers(lambda: torch.autocast("cpu", enabled=False)))
    job = _job(Layers)
    assert not any("bfloat16" in text for text in plain.bodies.values())
    assert any("bfloat16" in text for text in job.bodies.values())
    reference = train_one_device(plain, [_batch(0)])
    with job.launch("loopback") as run:
        errors = compare(run, [_batch(0)], reference)
    assert errors.gradient > 100 * BOUND


def _casts_of_weights(job: Job) -> int:
    [forward] = {task.body for c in job.plan.classes for task in c.tasks if _is_forward(task)}
    return job.bodies[forward].count("aten._to_copy.default")


def _is_forward(task: Any) -> bool:
    return getattr(task, "phase", "") == "F"


class Twice(nn.Module):
    """A weight that is used twice in each of some autocasts."""

    def __init__(self, *autocasts: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.autocasts = autocasts

    def forward(self, x: Tensor) -> Tensor:
        for autocast in self.autocasts:
            with autocast():
                x = self.linear(torch.tanh(self.linear(x.bfloat16())))
        return x.float()


def _bf16(**options: Any) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("autocasts", "casts"),
    [
        ((_bf16(),), 1),
        ((_bf16(), _bf16()), 2),  # what the first one has cast is forgotten
        ((_bf16(cache_enabled=False),), 2),
    ],
    ids=["one", "two", "uncached"],
)
def test_a_weight_is_cast_as_often_as_in_eager_mode(autocasts: Any, casts: int) -> None:
    """Gradients of its uses are added in bfloat16, if one cast serves them, and else in float32."""
    job = _job(lambda: Twice(*autocasts))
    assert _casts_of_weights(job) == casts + 2  # the batch's, and that of the result
    _check(job, bound=0.0)


def test_autocast_in_the_step() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(batch)
            return F.mse_loss(result, batch)

    _check(_job(lambda: Layers(lambda: torch.autocast("cpu")), step, pp=2), bound=0.0)


def test_autocast_of_another_device_does_nothing() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        job = _job(lambda: Layers(lambda: torch.autocast("cuda", dtype=torch.bfloat16)), pp=2)
        assert not any("bfloat16" in text for text in job.bodies.values())
        _check(job, bound=0.0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).float()


def test_statistics_and_evaluation_under_autocast() -> None:
    job = _job(Normed, dp=2)
    _check(job)
    model = Normed()
    with job.launch("loopback") as run:
        model.load_state_dict(run.parameters() | run.buffers())
        for piece in _batch(0).view(2, 2, 2, WIDTH).transpose(0, 1).flatten(0, 1):
            model(piece)
        run.step(_batch(0))
        buffers = run.buffers()
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=BOUND, atol=BOUND)
        model.load_state_dict(run.parameters() | buffers)
        model.eval()
        with torch.no_grad():
            wanted = [float(_mean_square(model, piece)) for piece in _batch(1).chunk(4)]
        assert run.evaluate(_batch(1)).loss == pytest.approx(sum(wanted) / 4, rel=BOUND)
