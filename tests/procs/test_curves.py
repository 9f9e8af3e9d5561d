"""Fifty steps under eight strategies lie on the curve of one device."""

from functools import cache
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.training.verify import load_initial
from tests.procs.conftest import GetPool
from tests.strategies import strategy_of
from tests.zoo import ADAMW, CASES, PIECES, program_of

pytestmark = pytest.mark.xdist_group("procs")

NAME, STEPS, CLIP, BOUND = "deep_moe", 50, 0.5, 1e-9
STRATEGIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "zero 1": ("procs", "dp2", "none", {"zero": 1}),
    "1f1b": ("loopback", "pp2", "1f1b", {}),
    "interleaved, recompute": ("procs", "pp2", "interleaved_1f1b", {"recompute": "expensive"}),
    "experts, zero 1": ("loopback", "ep2", "none", {"zero": 1}),
    "zb-h1 on four": ("loopback", "pp4", "zb_h1", {}),
    "zbv, zero 3": ("procs", "pp2_dp2", "zbv", {"zero": 3}),
    "dualpipev, experts, zero 2": ("procs", "pp2_ep2", "dualpipev", {"zero": 2}),
    "gpipe, experts, zero 3, recompute": (
        "procs",
        "pp2_ep2",
        "gpipe",
        {"zero": 3, "recompute": "nothing"},
    ),
}


def warm_then_fade(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 0.97**step)
    )


def _batches() -> list[Any]:
    return [CASES[NAME].batch(seed % 2) for seed in range(STEPS)]


@cache
def one_device() -> list[float]:
    """The user's module in a plain loop: eager autograd, clip_grad_norm_, AdamW, LambdaLR."""
    job = program_of(NAME).apply(strategy_of("one", "none")).lower(optimizer=ADAMW)
    model = job.source.make_model()
    load_initial(model, job)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW.options)
    scheduler = warm_then_fade(optimizer)
    losses = []
    for batch in _batches():
        total = 0.0
        for piece in range(PIECES):
            rows = {name: leaf.chunk(PIECES)[piece] for name, leaf in batch.items()}
            loss = job.source.step(model, rows) / PIECES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses


def _job(degrees: str, schedule: str, options: dict[str, Any]) -> Job:
    strategy = strategy_of(degrees, schedule, **options)
    return program_of(NAME).apply(strategy).lower(optimizer=ADAMW, clip=CLIP)


@pytest.mark.parametrize("name", STRATEGIES)
def test_curve_lies_on_that_of_one_device(pool: GetPool, name: str) -> None:
    where, degrees, schedule, options = STRATEGIES[name]
    job = _job(degrees, schedule, options)
    launch: Any = pool(job.plan.mesh.size) if where == "procs" else "loopback"
    training = piper.train(
        job, _batches(), steps=STEPS, launch=launch, lr_schedule=warm_then_fade, log="none"
    )
    reference = one_device()
    errors = [abs(a - b) / b for a, b in zip(training.losses, reference, strict=True)]
    assert max(errors) <= BOUND, f"step {errors.index(max(errors)) + 1}: {max(errors):.1e}"
    assert reference[-1] < 0.8 * reference[0]
    assert any(record.norm and record.norm > CLIP for record in training.records)
    assert [record.lr for record in training.records[:6]] == pytest.approx(
        [ADAMW.options["lr"] * min((step + 1) / 5, 0.97**step) for step in range(6)]
    )
