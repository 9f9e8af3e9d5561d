"""Worker processes import your file to find the function that reads their data. What stands at its
top level runs again in each of them; what stands under the guard runs in your process alone.

See: [launchers](../guide/launchers.md)
"""

from collections.abc import Iterator

import torch
from torch import nn

import piper


def model() -> nn.Module:
    return nn.Linear(6, 3)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(8 // share.num_ranks, 6)


if __name__ == "__main__":
    job = piper.trace(model, torch.ones(8, 6), step).apply(piper.strategies.parallel(dp=2)).lower()
    training = piper.train(job, data, steps=2, launch="local")
    print(training.losses[-1])
