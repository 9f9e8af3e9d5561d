"""Models as people write them: each trains as on one device, and says nothing while it is traced."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device

logger = logging.getLogger(__name__)
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 3, 6, dtype=torch.float64)}


def _step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).pow(2).mean()


def _model(forward: Forward, **modules: Callable[[], Any]) -> Callable[[], nn.Module]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            for name, make in modules.items():
                setattr(self, name, make())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    return lambda: Model().double()


def _assert_exact(
    make_model: Callable[[], nn.Module], batch: Callable[[], Any] = _batch, step: Any = _step
) -> Program:
    torch.manual_seed(0)
    batches = [batch() for _ in range(2)]
    program = piper.trace(make_model, batches[0], step)
    job = program.apply(parallel(dp=2, microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors
    return program


def test_words_are_not_said(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        logger.warning("of shape %s", x.shape)
        logging.info("values %s", x)
        print("mean", x.mean())
        return self.first(x)

    piper.trace(_model(forward), _batch(), _step)
    assert capsys.readouterr().out == ""
    assert not caplog.records
    _assert_exact(_model(forward))  # the reference, which is eager, says it


RECURRENT = {
    "lstm": lambda: nn.LSTM(6, 6, num_layers=2, batch_first=True),
    "both_ways": lambda: nn.LSTM(6, 3, bidirectional=True),
    "gru": lambda: nn.GRU(6, 6, batch_first=True),
    "dropout": lambda: nn.GRU(6, 6, num_layers=3, batch_first=True, dropout=0.5),
    "relu": lambda: nn.RNN(6, 6, nonlinearity="relu", num_layers=2, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.layer.batch_first:
            return self.layer(x.transpose(0, 1))[0].transpose(0, 1)
        return self.layer(x)[0]

    _assert_exact(_model(forward, layer=RECURRENT[name]))


def test_dropout_between_recurrent_layers_is_there() -> None:
    """Torch's own decomposition forgets it; an evaluation has none."""
    program = piper.trace(
        _model(lambda self, x: self.layer(self.first(x))[0], layer=RECURRENT["dropout"]),
        _batch(),
        _step,
    )
    batch = _batch()
    with program.lower(optimizer=piper.sgd(lr=0.0)).launch("single") as run:
        losses = {run.step(batch).loss for _ in range(3)}
        assert len(losses) == 3
        assert run.evaluate(batch).loss == run.evaluate(batch).loss


class Encoding(UserDict[str, torch.Tensor]):
    """A dictionary that is none, with its items as attributes, as tokenizers give it."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_user_dict_is_a_batch() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch).mean() * batch.x.mean()

    model = _model(lambda self, x: self.first(x))
    program = _assert_exact(model, batch=lambda: Encoding(_batch()), step=step)
    assert "batch:x" in program.graph.values


def test_strides_that_fake_tensors_have_wrong() -> None:
    """The gradient of softplus keeps the order of dims of the gradient that it is given."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.first(x)).transpose(1, 2).contiguous().cumsum(-1)

    _assert_exact(_model(forward))


def test_a_chance_of_zero_drops_no_layer() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            chance = torch.rand([])
            if self.training and chance < self.layerdrop:
                continue
            x = F.dropout(layer(x), 0.2)
        return x

    _assert_exact(_model(forward, second=lambda: nn.Linear(6, 6), layerdrop=lambda: 0.0))


def test_what_comes_back_has_the_models_names() -> None:
    """Also what no step reads, and names that a graph's own names would not allow."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a b": nn.Linear(6, 6), "ü@/:%": nn.Linear(6, 6)})
            self.unused = nn.Linear(2, 3)
            self.register_buffer("idle", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["ü@/:%"](self.layers["a b"](x))

    batch = _batch()
    job = piper.trace(lambda: Odd().double(), batch, _step).lower(optimizer=piper.adamw(lr=0.1))
    reference = train_one_device(job, [batch])
    with job.launch("single") as run:
        run.step(batch)
        found = run.parameters()
        assert list(found) == [name for name, _ in Odd().named_parameters()]
        for name, value in reference.parameters.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0.0)
        trained = {name for name in found if not name.startswith("unused")}
        assert run.gradients().keys() == run.optimizer_state().keys() == trained
        assert torch.equal(run.buffers()["idle"], torch.ones(2, dtype=torch.float64))
        assert run.differing_replicas() == []
