"""Custom operators on processes: workers import what registers them."""

import pytest
import torch
from torch import nn

import piper
from piper.bodies.files.registrations import registering_modules
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.procs import own_operators

pytestmark = pytest.mark.xdist_group("procs")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = own_operators.twice(self.layers[0](x))
        x = own_operators.scaled(x, self.scale)
        return torch.ops.own.thrice(torch.tanh(self.layers[1](x)))


def test_workers_have_the_users_operators() -> None:
    batch = {"x": torch.randn(8, 6, dtype=torch.float64)}
    program = piper.trace(lambda: Model().double(), batch, lambda m, b: m(b["x"]).pow(2).mean())
    job = program.apply(parallel(pp=2, microbatches=2, schedule="zb_h1")).lower(
        optimizer=piper.adamw(lr=1e-3)
    )
    assert registering_modules(job.bodies.values()) == [own_operators]
    assert any("own.scaled_backward" in text for text in job.bodies.values())
    reference = train_one_device(job, [batch])
    with job.launch("local") as run:  # processes that have imported nothing of this file
        assert compare(run, [batch], reference).exact
