"""mixture: the loop over experts that it stands for, exact and sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import piper
from piper.strategies import parallel
from piper.training.verify import compare, relative_error, train_one_device

EXPERTS, TOP = 4, 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 6, 6))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.tanh(piper.grouped_mm(rows, self.weight, counts))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return piper.mixture(self.experts, x, chosen, weights, num_experts=EXPERTS)


class Looping(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        out = torch.zeros_like(x)
        for index, weight in enumerate(self.experts.weight):
            rows, nth = torch.where(chosen == index)
            out = out.index_add(0, rows, torch.tanh(x[rows] @ weight) * weights[rows, nth, None])
        return out


def test_it_is_the_loop() -> None:
    torch.manual_seed(0)
    mixed, looping = Mixed().double(), Looping().double()
    looping.load_state_dict(mixed.state_dict())
    x = torch.randn(16, 6, dtype=torch.float64)
    results = [model(x) for model in (mixed, looping)]
    assert relative_error(*(result.detach() for result in results)) < 1e-14
    for result in results:
        result.pow(2).sum().backward()
    for mine, other in zip(mixed.parameters(), looping.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert relative_error(mine.grad, other.grad) < 1e-13


def test_its_experts_are_sharded() -> None:
    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return model(batch["x"]).pow(2).mean()

    torch.manual_seed(0)
    batches = [{"x": torch.randn(16, 6, dtype=torch.float64)} for _ in range(2)]
    program = piper.trace(lambda: Mixed().double(), batches[0], step)
    strategy = parallel(dp=2, ep=2, microbatches=2)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=1) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors
