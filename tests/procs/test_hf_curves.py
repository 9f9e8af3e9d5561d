"""Twenty steps of models as people have them, on four processes, lie on the curve of one device."""

from __future__ import annotations

import os

import pytest
import torch

import piper
from piper.frontend.capture.lifted import LiftedStep
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verify import train_one_device
from tests.procs.conftest import GetPool
from tests.zoo_more import MIXTURES, MODELS

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.xdist_group("procs"),
    pytest.mark.timeout(600),
    pytest.mark.skipif("PIPER_LONG" not in os.environ, reason="minutes: PIPER_LONG=1 runs it"),
    pytest.mark.filterwarnings("ignore:the traced code changes Python state"),
]

STEPS, BOUND = 20, 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_curve_lies_on_that_of_one_device(pool: GetPool, name: str) -> None:
    tiny = MODELS[name]()
    torch.manual_seed(0)
    batches = [doubled(tiny.batch()) for _ in range(2)] * (STEPS // 2)
    step = LiftedStep(tiny.step)  # what is float32 whatever the model's dtype is float64 too
    program = piper.trace(doubled_model(tiny.make_model), batches[0], step)
    strategy = parallel(pp=2, dp=2, ep=2 if name in MIXTURES else 1, zero=2, microbatches=2)
    # SGD: Adam makes a step of full size out of rounding where a gradient is zero by mathematics.
    job = program.apply(strategy).lower(optimizer=piper.sgd(lr=0.05))
    wanted = train_one_device(job, batches).losses
    with job.launch(pool(4)) as run:
        losses = [run.step(batch).loss for batch in batches]
        assert run.differing_replicas() == []
    assert losses == pytest.approx(wanted, rel=BOUND)
    assert losses[-1] < losses[1]  # it learns the two batches
