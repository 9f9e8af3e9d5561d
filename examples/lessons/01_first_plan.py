"""Lesson 1: a first plan. Two ranks train one small model, and it is known before what each will do.

python examples/lessons/01_first_plan.py
"""

# 1. An ordinary model, with its two halves tagged.
import math

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = torch.relu(self.first(x))
        with piper.annotate("PP"):
            return self.second(x)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x[:, :4]}


# 2. The training step as a graph.
program = piper.trace(Model, batch(), step)
for line in program.as_text().splitlines():
    if line.startswith("chunk"):
        print(line.partition(" on ")[0])
print()


# 3. How to distribute it.
def strategy(s: piper.Schedule) -> None:
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP=1), mesh.at(pp=1))
    s.split(where(), "MB", 2)


# 4. The plan.
job = program.apply(strategy).lower(optimizer=piper.sgd(lr=0.1))
print(job.summary())
print()

# 5. One task of it.
print(job.explain("F[PP=1,MB=0]"))
print()

# 6. Train on two ranks, and on one device for comparison.
with job.launch("loopback") as run:
    alone = Model()
    alone.load_state_dict(run.state_dict())  # the same initial weights
    losses = [run.step(batch(seed)).loss for seed in range(4)]

optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for seed, loss in enumerate(losses):
    expected = step(alone, batch(seed))
    print(f"step {seed + 1}: two ranks {loss:.4f}, one device {expected.item():.4f}")
    assert math.isclose(loss, expected.item(), rel_tol=1e-5)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
