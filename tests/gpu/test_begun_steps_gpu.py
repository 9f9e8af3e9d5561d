"""On a GPU the host is ahead of steps that have begun, which train as if each was waited for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piper
from piper.strategies import parallel
from tests.gpu.conftest import GetPool
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]


def test_they_train_as_if_each_was_waited_for(pool: GetPool) -> None:
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=2)
    job = program_of("dropout").apply(strategy).lower(optimizer=ADAMW, device="cuda", clip=0.1)
    batches = batches_of("dropout")
    with job.launch(pool(4)) as run:
        wanted = [run.step(batch).loss for batch in batches]
    with job.launch(pool(4)) as run:
        begun = [run.begin(batch) for batch in batches]
        assert [each.result().loss for each in begun] == pytest.approx(wanted, rel=1e-12)
        assert not run.differing_replicas()


def test_the_device_goes_from_one_step_to_the_next() -> None:
    """It is in the middle of the first one when the second has been dispatched."""
    batch = torch.randn(4096, 4096)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(24)))
    program = piper.trace(lambda: model, batch, lambda model, x: model(x).square().mean())
    job = program.lower(optimizer=ADAMW, device="cuda")
    with job.launch("single") as run:
        run.step(batch)
        run.begin(batch)
        run.begin(batch)
        first, second = (found._made for found in run.workers.pool.members[0].begun)  # type: ignore[attr-defined]
        assert not first.query()
        first.synchronize()
        assert not second.query()
