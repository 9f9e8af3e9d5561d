"""What make_model may do with values: read those that are certain; the rest is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import TraceError
from piper.training.verify import compare, train_one_device


def _model(scale: Callable[[], Any]) -> Callable[[], nn.Module]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.scale = float(scale())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    return lambda: Scaled().double()


BATCH = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _trace(scale: Callable[[], Any]) -> piper.Program:
    return piper.trace(_model(scale), BATCH, lambda model, x: model(x).square().mean())


def _ones() -> Tensor:
    weight = nn.Parameter(torch.empty(2, 3))
    nn.init.ones_(weight)
    with torch.no_grad():
        weight[0].mul_(2)
    return weight


READS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: torch.arange(4.0).numpy().sum(),
    "numpy of a parameter": lambda: _ones().detach().numpy().sum(),
    "numpy by force": lambda: _ones().numpy(force=True)[0, 1],
    "numpy of a view": lambda: torch.arange(6.0).view(2, 3).T[1:].numpy()[1, 1],
    "numpy there and back": lambda: torch.from_numpy(np.arange(3.0)).mul(2).numpy().sum(),
    "asarray": lambda: np.asarray(torch.arange(4.0)).sum(),
    "memoryview": lambda: memoryview(torch.arange(4.0).numpy())[3],
    "dlpack": lambda: np.from_dlpack(torch.arange(4.0)).sum(),
    "tolist": lambda: torch.linspace(0, 1, 5).tolist()[-1],
    "item": lambda: torch.linspace(0, 1, 5)[-1].item(),
    "format": lambda: f"{torch.tensor(2.5):.2f}",
    "branch": lambda: 2 if torch.arange(3).sum() == 3 else 3,
}


@pytest.mark.parametrize("name", READS)
def test_values_that_are_certain_can_be_read(name: str) -> None:
    scale = READS[name]
    wanted = float(scale())
    assert wanted > 0
    job = _trace(scale).lower()
    assert job.source.captured(8).model.scale == wanted
    with job.launch("loopback") as run:
        assert compare(run, [BATCH], train_one_device(job, [BATCH])).exact


@pytest.mark.parametrize(
    "scale",
    [
        lambda: torch.rand(3).numpy().sum(),
        lambda: nn.Linear(3, 3).weight.detach().numpy().sum(),
        lambda: np.asarray(torch.randn(3)).sum(),
        lambda: np.from_dlpack(torch.rand(3)).sum(),
        lambda: torch.rand(3).tolist()[0],
        lambda: torch.rand(3).sum().item(),
    ],
)
def test_values_that_are_drawn_cannot_be_read(scale: Callable[[], Any]) -> None:
    line = scale.__code__.co_firstlineno
    words = rf"reads the value of a random tensor \(.*test_building.py:{line}\)"
    with pytest.raises(TraceError, match=words):
        _trace(scale)


@pytest.mark.parametrize(
    "scale",
    [
        lambda: torch.equal(torch.ones(3), torch.ones(3)),
        lambda: len(torch.arange(3).nonzero()),
        lambda: torch.arange(3.0)[torch.arange(3) > 1].sum(),
    ],
)
def test_operators_that_look_at_values_are_refused(scale: Callable[[], Any]) -> None:
    line = scale.__code__.co_firstlineno
    words = rf"looks at the values of tensors at .*test_building.py:{line} \(aten\."
    with pytest.raises(TraceError, match=words):
        _trace(scale)


def test_what_is_written_to_a_copy_is_not_lost_in_silence() -> None:
    def scale() -> float:
        weight = torch.ones(3)
        weight.numpy()[0] = 5.0
        return float(weight.sum())

    with pytest.raises(ValueError, match="read-only"):
        _trace(scale)


def test_a_generator_of_its_own_is_refused() -> None:
    def scale() -> Tensor:
        return nn.init.normal_(torch.empty(1), generator=torch.Generator().manual_seed(3))

    line = scale.__code__.co_firstlineno + 1
    words = rf"draws from a generator of its own \(.*test_building.py:{line}\)"
    with pytest.raises(TraceError, match=words):
        _trace(scale)
