"""Python state that a traced step changes: told of, unless the step sets it back."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import piper


class Remembering(nn.Module):
    """What it is at the end of forward is what `last` says."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.busy = False
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.busy = True
        x = self.layer(x)
        self.busy = self.last
        return x


def _trace(last: bool) -> None:
    batch = {"x": torch.randn(4, 2)}
    piper.trace(lambda: Remembering(last), batch, lambda model, batch: model(batch["x"]).mean())


def test_a_change_is_told_with_its_line() -> None:
    with pytest.warns(UserWarning, match=r"Python state.*: model \(.*test_python_state.py:\d+\)"):
        _trace(last=True)


def test_state_that_is_set_back_is_no_change() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trace(last=False)


def test_tracing_imports_no_transformers() -> None:
    code = (
        "import sys, torch, piper; "
        "piper.trace(lambda: torch.nn.Linear(2, 1), {'x': torch.randn(4, 2)}, "
        "lambda model, batch: model(batch['x']).mean()); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
