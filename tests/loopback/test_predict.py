"""Predictions: what one device gives for the whole batch, in its order, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import PlanError, RunError, TraceError
from piper.strategies import parallel
from tests import tensor_zoo, zoo
from tests.zoo import ADAMW

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("moe", {"dp": 2, "ep": 2, "zero": 2, "microbatches": 4}),
    ("dropout", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb_h1", "microbatches": 4}),
    ("deep_moe", {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "dualpipev", "microbatches": 4}),
    ("untagged", {"pp": 4, "schedule": "1f1b", "microbatches": 4}),
    ("statistics", {"pp": 2, "dp": 2, "microbatches": 2}),
    ("deep", {"pp": 2, "schedule": "interleaved_1f1b", "recompute": "nothing", "microbatches": 8}),
]  # fmt: skip
TENSOR_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("fused", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}),
    ("rms", {"tp": 2, "dp": 2, "zero": 3}),
    ("rms", {"tp": 2, "cp": 2}),
]


def predict(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch)
    return {"logits": logits, "best": logits.argmax(-1), "sure": logits.softmax(-1).amax((1, 2))}


def _check(case: Any, degrees: dict[str, Any], adversary: bool) -> None:
    batch, other = case.batch(0), case.batch(7)
    other.pop("labels")  # nothing to predict needs them
    job = (
        piper.trace(case.model, batch, case.step).apply(parallel(**degrees)).lower(optimizer=ADAMW)
    )
    model = case.model().eval()
    with job.launch("loopback", adversary=adversary) as run:
        for _ in range(2):
            run.step(batch)
        found = run.predict(other, predict)
        model.load_state_dict(run.state_dict())
        with torch.no_grad():
            wanted = predict(model, other)
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
        before = run.parameters()
        again = run.predict(other, predict)
        assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
        assert all(torch.equal(before[name], now) for name, now in run.parameters().items())
        assert run.steps == 2 and run.step(batch).loss > 0


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize(("name", "degrees"), ROWS)
def test_predictions_are_those_of_one_device(
    name: str, degrees: dict[str, Any], adversary: bool
) -> None:
    _check(zoo.CASES[name], degrees, adversary)


@pytest.mark.parametrize(("name", "degrees"), TENSOR_ROWS)
def test_so_they_are_where_tensors_are_cut(name: str, degrees: dict[str, Any]) -> None:
    _check(tensor_zoo.CASES[name], degrees, adversary=False)


def _job(**options: Any) -> piper.Job:
    program = piper.trace(
        lambda: nn.Linear(4, 3).double(),
        torch.ones(8, 4, dtype=torch.float64),
        lambda model, x: model(x).square().mean(),
    )
    return program.apply(parallel(dp=2, microbatches=2)).lower(**options)


def test_a_tensor_or_a_tuple_comes_back_as_it_is_returned() -> None:
    rows = torch.arange(32, dtype=torch.float64).view(8, 4)
    with _job().launch("loopback") as run:
        weight, bias = run.parameters()["weight"], run.parameters()["bias"]
        wanted = rows @ weight.T + bias
        torch.testing.assert_close(run.predict(rows, lambda model, x: model(x)), wanted)
        pair = run.predict(rows, lambda model, x: (model(x), x * 2))
        assert isinstance(pair, tuple) and torch.equal(pair[1], rows * 2)
        torch.testing.assert_close(pair[0], wanted)
        # Of another number of rows, by the same function.
        torch.testing.assert_close(run.predict(rows[:4], lambda model, x: model(x)), wanted[:4])


def test_one_function_is_compiled_once() -> None:
    with _job().launch("loopback", shapes=2) as run:
        rows = torch.ones(8, 4, dtype=torch.float64)
        for _ in range(5):
            run.predict(rows, lambda model, x: model(x))
        assert len([role for role in run.workers.plans if role.startswith("predict")]) == 1
        run.predict(rows[:4], lambda model, x: model(x))
        with pytest.raises(RunError, match="2 plans are compiled for predictions already"):
            run.predict(rows, lambda model, x: model(x) + 1)


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch) * self.scale


def _scaled(scale: float) -> Any:
    def predict(model: nn.Module, batch: dict[str, Tensor], *, scale: float = scale) -> Tensor:
        return model(batch) * scale

    return predict


_SCALE = 1.0


def _by_module(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def scale() -> float:
        return _SCALE

    return model(batch) * scale()


def _of_module(scale: float) -> Any:
    global _SCALE
    _SCALE = scale
    return _by_module


def _by_calls(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch) * _even(2)


def _even(left: int) -> float:
    return _odd(left - 1) if left else _SCALE


def _odd(left: int) -> float:
    return _even(left - 1)


def _of_called(scale: float) -> Any:
    _of_module(scale)
    return _by_calls


_rule: Any = None


def _of_rule(scale: float) -> Any:
    """The function itself is another one."""
    global _rule
    _rule = (lambda x: x) if scale == 1.0 else (lambda x: x * 10.0)
    return _by_rule


def _by_rule(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = _rule(model(batch))
    return found


_TABLE = torch.ones(3)


def _by_default(model: nn.Module, batch: dict[str, Tensor], rows: int = 0) -> Tensor:
    assert len(_TABLE) > rows  # what is no plain value goes by itself
    return _by_module(model, batch)


def _of_default(scale: float) -> Any:
    _of_module(scale)
    return _by_default


@pytest.mark.parametrize(
    "make",
    [lambda scale: _Scaled(scale).predict, _scaled, _of_module, _of_called, _of_rule, _of_default],
    ids=["method", "default", "module", "called", "function", "default and module"],
)
def test_equal_code_with_other_values_is_another_function(make: Any) -> None:
    case = zoo.CASES["untagged"]
    batch = case.batch(0)
    job = zoo.program_of("untagged").apply(parallel(dp=2)).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        once = run.predict(batch, make(1.0))
        assert torch.equal(run.predict(batch, make(10.0)), 10.0 * once)
        assert torch.equal(run.predict(batch, make(1.0)), once)
        if make in (_of_module, _of_called, _of_rule, _of_default):  # code and values as before
            assert sum(role.startswith("predict") for role in run.workers.plans) == 2


def test_moving_averages_predict_too() -> None:
    rows = torch.ones(8, 4, dtype=torch.float64)
    with _job(ema=0.5).launch("loopback") as run:
        for _ in range(2):
            run.step(rows)
        averages = run.ema()
        wanted = rows @ averages["weight"].T + averages["bias"]
        found = run.predict(rows, lambda model, x: model(x), ema=True)
        torch.testing.assert_close(found, wanted)
        assert not torch.equal(run.predict(rows, lambda model, x: model(x)), found)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda model, x: model(x).mean(0), "does not have a row for each sample"),
        (lambda model, x: [1, 2], "predict must return a tensor, or a tuple or dictionary"),
        (lambda model, x: None, "predict must return a tensor, or a tuple or dictionary"),
    ],
)
def test_what_is_no_prediction_is_refused(function: Any, words: str) -> None:
    with _job().launch("loopback") as run:
        with pytest.raises(TraceError, match=words) as caught:
            run.predict(torch.ones(8, 4, dtype=torch.float64), function)
        assert "test_predict.py:" in str(caught.value) and "legal:" in str(caught.value)
        assert run.step(torch.ones(8, 4, dtype=torch.float64)).loss > 0  # the run goes on


def test_rows_that_do_not_divide_are_refused() -> None:
    with _job().launch("loopback") as run, pytest.raises(ValueError, match="does not divide"):
        run.predict(torch.ones(6, 4, dtype=torch.float64), lambda model, x: model(x))


def test_a_job_from_a_file_has_no_code_to_predict_with(tmp_path: Any) -> None:
    _job().save(tmp_path / "job.json")
    loaded, text = (
        piper.load_job(tmp_path / "job.json"),
        "it has no program to compile a prediction of",
    )
    with loaded.launch("loopback") as run, pytest.raises(PlanError, match=text):
        run.predict(torch.ones(8, 4, dtype=torch.float64), lambda model, x: model(x))


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2, "sp": True}], ids=str)
def test_leaves_that_a_prediction_does_not_read_may_be_cut(degrees: dict[str, Any]) -> None:
    """Labels are cut like tokens in training, and a prediction has no use for them."""
    case = tensor_zoo.CASES["dense"]
    job = tensor_zoo.program_of("dense").apply(parallel(**degrees)).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        found = run.predict(case.batch(0), lambda model, batch: model(batch))
        alone = case.model().eval()
        alone.load_state_dict(run.state_dict())
    assert isinstance(found, torch.Tensor)
    assert torch.allclose(found, alone(case.batch(0)), rtol=1e-12, atol=1e-12)
