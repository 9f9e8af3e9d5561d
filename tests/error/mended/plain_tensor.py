"""A buffer is a tensor that Piper knows: it makes it on every rank that reads it, saves it and moves
it to the device. A plain attribute is only known to the object in your process.

See: [buffers that change](../guide/model.md#buffers-that-change)
"""

import torch
from torch import nn

import piper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


example = torch.ones(8, 6)
with piper.trace(Model, example, step).lower().launch("loopback") as run:
    print(run.step(example).loss)
