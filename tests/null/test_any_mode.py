"""One recording serves training and evaluation, unless the code looks at the model's mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.compiler import captures
from piper.frontend.capture.capture import finish, record
from tests.null.test_any_rows import EXAMPLES, nodes_of

BATCH = torch.ones(8, 6)


class Model(nn.Module):
    """Doubles its result in training, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(6, 6)
        self.twice = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        match self.way:
            case "attribute":
                return x * 2 if self.training else x
            case "getattr":
                return x * 2 if getattr(self, "training") else x  # noqa: B009
            case "dictionary":
                return x * 2 if vars(self.linear)["training"] else x
            case "child":
                return x * (1 + int(next(self.children()).training))
            case "functional":
                return F.dropout(x, 0.5, self.linear.training) * 2
            case "all":
                return x * 2 if all(m.training for m in self.modules()) else x
        return x


class Overriding(Model):
    """Its eval() does more than torch's."""

    def train(self, mode: bool = True) -> Model:
        self.twice = mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.twice else 1)


class Computed(Model):
    @property
    def training(self) -> bool:
        return self.twice

    @training.setter
    def training(self, mode: bool) -> None:
        self.twice = mode

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.twice else 1)


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def _looking(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean() * (2 if model.training else 1)


def _with(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), module())


WAYS = ("attribute", "getattr", "dictionary", "child", "functional", "all")
LOOKING: dict[str, tuple[Any, Any]] = {
    **{way: (lambda way=way: Model(way), _mean) for way in WAYS},
    "train() of its own": (lambda: Overriding(""), _mean),
    "a property": (lambda: Computed(""), _mean),
    "step": (lambda: Model(""), _looking),
    "dropout": (_with(lambda: nn.Dropout(0.5)), _mean),
}


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by the mode of each recording."""
    noted: list[bool] = []

    def noting(*program: Any, **options: Any) -> Any:
        noted.append(options["training"])
        return record(*program, **options)

    monkeypatch.setattr(captures, "record", noting)
    return noted


@pytest.mark.parametrize("name", LOOKING)
def test_code_that_looks_at_the_mode_is_recorded_again(name: str, modes: list[bool]) -> None:
    make_model, step = LOOKING[name]
    job = piper.trace(make_model, BATCH, step).lower()
    evaluation = job.evaluation()
    assert modes == [True, False]
    with job.launch("single") as run:
        before = run.evaluate(BATCH).loss
        trained = run.step(BATCH).loss
    if name not in ("functional", "dropout"):  # which halve at random
        assert trained == pytest.approx(2 * before)
    else:
        assert trained != before
    assert evaluation.plan.bodies != job.plan.bodies


@pytest.mark.parametrize("name", ["plain", "norm", *EXAMPLES])
def test_other_code_is_not(name: str, modes: list[bool]) -> None:
    plain = {"plain": lambda: Model(""), "norm": _with(lambda: nn.LayerNorm(6))}
    program = EXAMPLES[name] if name in EXAMPLES else (plain[name], BATCH, _mean)
    source = piper.trace(*program).source
    shared = source.variant(dtype="", training=False, cut=None).captured(source.batch_size)
    assert modes == [True]
    options = {"rows": source.batch_size, "any_rows": True, "training": False}
    recorded = finish(record(*program, **options), source.batch_size)
    assert nodes_of(shared, names=True) == nodes_of(recorded, names=True)
    assert not shared.facts.flowing and source.captured(source.batch_size).facts.flowing
