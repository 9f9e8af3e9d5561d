"""A program of a first hour, for processes: metrics, a NaN, a smaller last batch, predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import piper
from piper.strategies import parallel

ROWS = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.norm, self.dropout = nn.BatchNorm1d(6).double(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.dropout(self.norm(self.first(x)))
        with piper.annotate("PP"):
            return self.second(x)


def batch(number: int, rows: int = ROWS) -> dict[str, Tensor]:
    """The third one has a NaN, in the rows of the last data rank."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    if number == 2:
        x[-1, 0] = math.nan
    return {"x": x, "y": torch.randint(3, (rows,), generator=generator)}


def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(batch["x"])
    right, some = logits.argmax(-1) == batch["y"], batch["y"] > 0
    loss = nn.functional.cross_entropy(logits, batch["y"])
    return loss, {"accuracy": right.double().mean(), "some": ((right & some).sum(), some.sum())}


def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).softmax(-1)


def batches() -> list[dict[str, Tensor]]:
    """The last one is of 2 rows, which do not divide into four."""
    return [*(batch(number) for number in range(5)), batch(5, 2)]


def data(share: piper.Share) -> Iterator[dict[str, Tensor]]:
    for each in batches():
        whole = len(each["y"]) == ROWS
        rows = share.rows(ROWS) if whole else slice(share.rank, share.rank + 1)
        yield {name: leaf[rows] for name, leaf in each.items()}


def job() -> piper.Job:
    program = piper.trace(Model, batch(0), step)
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=2)
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=0.05), clip=math.inf)


def trained(run: piper.Run, given: Any) -> tuple[list[Any], list[float], Tensor, str]:
    """Records without times, an evaluation, predictions, and the origin of a NaN."""
    training = piper.train(run, given, epochs=2, on_nan="skip", log="none")
    records = [(r.step, r.loss, r.metrics, r.not_trained) for r in training.records]
    evaluated = run.evaluate(batch(0))
    skipped = run.step(batch(2), skip_nan=True)
    assert skipped.skipped and run.steps == len(records)
    origin = run.origin_of_nan()
    found = run.predict({"x": batch(7)["x"]}, predict)
    return records, [evaluated.loss, *evaluated.metrics.values()], found, origin
