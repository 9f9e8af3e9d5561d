"""Products added to sums by their own kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch

import piper
from piper.bodies.products import add_into
from piper.plan.local_order import Local
from piper.plan.summed_inside import summed_inside
from piper.strategies import parallel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from transformer import Sizes, Transformer, make_batch, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = Sizes(
    width=256, layers=2, heads=4, hidden=512, vocabulary=512, length=64, microbatches=4, rows=2
)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_one_kernel_adds(starts: bool, wide: bool) -> None:
    torch.manual_seed(0)
    grad, x = (torch.randn(300, n, device="cuda", dtype=torch.bfloat16) for n in (136, 72))
    flat = torch.randn(136 * 72 + 8, device="cuda", dtype=torch.float32 if wide else torch.bfloat16)
    total = flat[8:].view(136, 72)
    wanted = grad.double().t() @ x.double() + (0 if starts else total.double())
    if starts:
        total.fill_(float("nan"))
    add_into(total, grad.t(), x, starts)
    error = (total.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-6 if wide else 1e-2)


@pytest.mark.parametrize("compile", [False, True])
def test_trains_as_if_added_outside(compile: bool) -> None:
    """Beside the same plan without products, whose products are rounded to bfloat16 first."""
    program = piper.trace(lambda: Transformer(SIZES, 1), make_batch(SIZES), step)
    job = program.apply(parallel(microbatches=4)).lower(
        optimizer=piper.adamw(lr=1e-3, fused=True), precision="bf16", device="cuda"
    )
    part = job.plan.classes[0]
    assert summed_inside(Local(part.tasks, part.slots), job.plan.products, "cuda")
    losses = []
    for plan in (job.plan, msgspec.structs.replace(job.plan, products={})):
        job.plan = plan
        with job.launch("single", compile=compile) as run:
            losses.append([run.step(make_batch(SIZES, seed)).loss for seed in range(6)])
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-3, atol=0)
