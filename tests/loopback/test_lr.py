"""Learning rates from outside: torch's schedulers on a stand-in, beside a plain torch loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.errors import RunError
from piper.frontend.capture.capture import plain_name
from piper.plan.optimizers import Optimizer
from piper.plan.types import ParamGroup
from piper.runtime.worker.weights import initial_value
from piper.strategies import parallel
from piper.training.lr import LearningRate

STEPS = 8


def _sequential(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
    warm = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lrs.SequentialLR(
        optimizer, [warm, lrs.CosineAnnealingLR(optimizer, T_max=5)], milestones=[3]
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lrs.LRScheduler]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=5),
    "sequential": _sequential,
    "one_cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3),
}
OPTIMIZERS = [piper.adamw(lr=0.02, betas=(0.8, 0.99)), piper.sgd(lr=0.05, momentum=0.5)]
GROUPS = [ParamGroup(optimizer.name, optimizer.options) for optimizer in OPTIMIZERS]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in "xy")
    return {"x": x, "y": y}


@cache
def _program() -> Program:
    return piper.trace(lambda: _Model().double(), _batch(0), _step)


def _plain(job: Job, schedule: Any) -> tuple[list[dict[str, Any]], list[float], dict[str, Tensor]]:
    """A loop as anybody writes it: the group's values, the losses, the final parameters."""
    plan = job.plan
    model = _Model().double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = plan.tensors[plain_name(name)]
            param.copy_(initial_value(spec, job.bodies, seed=plan.seed))
    (group,) = plan.param_groups
    optimizer = getattr(torch.optim, group.optimizer)(model.parameters(), **group.options)
    scheduler = schedule(optimizer)
    groups, losses = [], []
    for step in range(STEPS):
        loss = _step(model, _batch(step))
        loss.backward()
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        groups.append(dict(optimizer.param_groups[0]))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        scheduler.step(*([loss.item()] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
    return groups, losses, dict(model.named_parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_stand_in_gives_what_a_plain_loop_has(name: str, optimizer: Optimizer) -> None:
    job = _program().lower(optimizer=optimizer)
    groups, losses, _ = _plain(job, SCHEDULES[name])
    rate = LearningRate(job.plan.param_groups, SCHEDULES[name])
    for group, loss in zip(groups, losses, strict=True):
        assert [{key: group[key] for key in rate.options[0]}] == rate.options
        assert rate.lr == group["lr"]
        rate.advance(loss)
    moves = {"betas" if optimizer.name == "AdamW" else "momentum"} if name == "one_cycle" else set()
    assert set(rate.options[0]) == {"lr", *moves}
    assert len({group["lr"] for group in groups}) > 1, "the schedule does nothing"


# One device: bit-equal. Two stages with clipping: the norm is summed in another order.
LOWERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "late clip": {"clip": 0.05, "late_clip": True},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("how", LOWERED)
@pytest.mark.parametrize("name", SCHEDULES)
def test_training_under_a_schedule_is_that_of_a_plain_loop(
    name: str, how: str, optimizer: Optimizer
) -> None:
    program = _program().apply(parallel(pp=2))
    job = program.lower(optimizer=optimizer, **LOWERED[how])
    _, losses, parameters = _plain(job, SCHEDULES[name])
    rate = LearningRate(job.plan.param_groups, SCHEDULES[name])
    found = []
    with job.launch("loopback") as run:
        for step in range(STEPS):
            run.workers.set_options(rate.options)  # type: ignore[attr-defined]
            found.append(run.step(_batch(step)).loss)
            rate.advance(found[-1])
        mine = run.parameters()
    if how == "plain":
        assert found == losses
        assert all(torch.equal(mine[k], p) for k, p in parameters.items())
    else:
        assert found == pytest.approx(losses, rel=1e-12)
        for key, param in parameters.items():
            torch.testing.assert_close(mine[key], param.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.1, "betas": (0.9, 0.9)}, "SGD has no 'betas'"),
        ({"lr": 1.0, "momentun": 0.0}, r"SGD has no 'momentun' \(did you mean 'momentum'"),
        ({"lr": "0.1"}, "SGD does not take lr='0.1'"),
        ({"lr": -1.0}, "SGD does not take lr=-1.0"),
        ({"lr": math.nan}, "SGD does not take lr=nan"),
        (0.1, "options of a parameter group are 0.1"),
        ([("lr", 0.1)], "options of a parameter group are"),
    ],
    ids=str,
)
def test_options_that_an_optimizer_does_not_take(options: Any, words: str) -> None:
    """They are refused where they are set, and no rank has taken any of them."""
    job = _program().apply(parallel(pp=2)).lower(optimizer=piper.sgd(lr=0.1))
    with job.launch("loopback") as run, job.launch("loopback") as other:
        with pytest.raises(RunError, match=words) as refused:
            run.set_options(options)
        assert "test_lr.py:" in str(refused.value)
        assert run.step(_batch(0)) == other.step(_batch(0))
        mine, theirs = run.parameters(), other.parameters()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_schedule_of_the_loss_needs_the_loss() -> None:
    rate = LearningRate(GROUPS[1:], SCHEDULES["plateau"])
    with pytest.raises(RunError, match="looks at the loss"):
        rate.advance()


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ("cosine", "sequential"),
        ("cosine", "plateau"),
        ("cosine", "restarts"),
        ("plateau", "cosine"),
    ],
)
def test_the_state_of_another_schedule_is_refused(saved: str, now: str) -> None:
    state = LearningRate(GROUPS[:1], SCHEDULES[saved]).state_dict()
    with pytest.raises(RunError, match=r"the schedule that was saved is \w+, not \w+.*\n  legal: "):
        LearningRate(GROUPS[:1], SCHEDULES[now]).load_state_dict(state)


def test_a_schedule_is_known_by_its_parts() -> None:
    def other(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
        parts = [lrs.ConstantLR(optimizer), lrs.CosineAnnealingLR(optimizer, T_max=5)]
        return lrs.SequentialLR(optimizer, parts, milestones=[3])

    state = LearningRate(GROUPS[:1], _sequential).state_dict()
    with pytest.raises(RunError) as caught:
        LearningRate(GROUPS[:1], other).load_state_dict(state)
    assert caught.value.message == (
        "the schedule that was saved is SequentialLR(LinearLR, CosineAnnealingLR), "
        "not SequentialLR(ConstantLR, CosineAnnealingLR)"
    )


def test_what_is_no_scheduler() -> None:
    with pytest.raises(RunError, match="lr_schedule made 3"):
        LearningRate(GROUPS[1:], lambda o: 3)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_from_its_state(name: str) -> None:
    one = LearningRate(GROUPS[:1], SCHEDULES[name])
    for step in range(4):
        one.advance(1.0 / (step + 1))
    other = LearningRate(GROUPS[:1], SCHEDULES[name])
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        assert other.options[0]["lr"] == one.options[0]["lr"]
        one.advance(1.0)
        other.advance(1.0)
