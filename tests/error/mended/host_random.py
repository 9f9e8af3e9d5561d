"""A number that Python draws would be drawn once, while the model is traced. Numbers of torch's are
drawn in every step, alike under every strategy.

See: [initial weights](../guide/model.md#initial-weights),
[recompute](../guide/memory.md#recompute)
"""

import torch
from torch import nn

import piper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.rand(1)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


example = torch.ones(8, 6)
with piper.trace(Model, example, step).lower().launch("loopback") as run:
    print(run.step(example).loss)
