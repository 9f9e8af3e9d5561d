"""`piper train` with metrics, epochs, a batch with NaN and a smaller last batch."""

from pathlib import Path

import pytest

from piper.cli.main import main

pytestmark = pytest.mark.xdist_group("procs")

FILE = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 2)


def batch(seed=0):
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(seed))


def step(model, batch):
    out = model(batch)
    return out.square().mean(), {"largest": out.abs().max()}


def data(share):
    for number in range(3):
        rows = batch(number)
        if number == 1:
            rows[7] = float("nan")
        yield rows[share.rows(8)]
    yield batch(9)[:2][share.rows(2)]
"""


def test_skip_and_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    options = ["train", str(path), "--dp", "2", "--microbatches", "2", "--epochs", "2", "--on-nan"]
    assert main([*options, "skip"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the batch is skipped, and nothing has changed") == 2
    assert printed.count("a batch of 2 samples was left out") == 2
    assert printed.count("  largest 0.") == 4 and "4 steps in" in printed
    assert main([*options, "stop"]) == 2
    failed = capsys.readouterr().err
    assert "RunError: step 2: loss nan, norm nan; parameters are those of before" in failed
    assert "is given a NaN in the batch, in microbatch 1 of data rank 1" in failed


def test_epochs_take_data_that_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE.partition("def data")[0])
    assert main(["train", str(path), "--epochs", "2"]) == 2
    assert "has no data(share), which ends" in capsys.readouterr().err
