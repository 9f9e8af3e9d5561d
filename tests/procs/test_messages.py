"""Messages between processes, whose sends last until their peer receives."""

from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.strategies import parallel
from tests.procs.conftest import GetPool

pytestmark = pytest.mark.xdist_group("procs")


class Skip(nn.Module):
    """What the first stage makes is read by the fourth, on its own rank, and by the last, on another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
                if index == 0:
                    first = x.detach() * 2
                if index in (3, 8):
                    x = x + first
        return x


def test_nobody_waits_for_a_send(pool: GetPool) -> None:
    """The fourth stage frees what is being sent to a rank that receives it much later."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    strategy = parallel(pp=3, schedule="interleaved_1f1b", microbatches=6)
    job = piper.trace(Skip, batch, step).apply(strategy).lower()
    with job.launch("loopback", adversary=True) as run:
        loss = run.step(batch).loss
    with job.launch(pool(3)) as run:
        assert run.step(batch).loss == pytest.approx(loss, rel=1e-6)
