"""Means over targets that padding leaves out: a warning where cutting changes them, and mean="batch"."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.errors import TraceError
from piper.strategies import parallel
from piper.training.verify import load_initial
from tests import zoo_hf
from tests.loopback import ragged


def _padded(rows: int = 8, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Row r has r % length targets that are padding."""
    batch = ragged.batch(rows, length, seed)
    for row in range(rows):
        batch["labels"][row, length - row % length :] = -100
    return batch


def _make_model() -> nn.Module:
    model = ragged.Mixer()
    model.dropout.p = 0.0
    model.norms = nn.ModuleList(nn.Identity() for _ in range(4))  # they would see the cutting
    return model


def _warnings_of(batch: dict[str, Tensor], step: Any, **options: Any) -> list[str]:
    mean = options.pop("mean", "microbatch")
    program = piper.trace(_make_model, batch, step, mean=mean).apply(parallel(**options))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program.lower()
    return [str(one.message) for one in said]


def test_a_mean_that_cutting_changes_is_warned_of_once() -> None:
    [text] = _warnings_of(_padded(), ragged.step, dp=2, microbatches=2)
    line = ragged.step.__code__.co_firstlineno + 2
    assert text == (
        f"step returns a mean over targets other than -100 (tests/loopback/ragged.py:{line}), of "
        "which 4 global microbatches of the example batch have 3 to 11: each microbatch counts "
        "alike, and so a target counts more where there are fewer; with "
        'trace(..., mean="batch"), or --mean batch, each target of the batch counts alike'
    )


def test_looking_for_it_costs_no_more_with_more_ranks() -> None:
    [text] = _warnings_of(_padded(256), ragged.step, dp=128)
    assert "of which 64 global microbatches of the example batch have 3 to 11" in text


def test_no_warning_where_cutting_changes_nothing() -> None:
    assert _warnings_of(_padded(), ragged.step) == []  # not cut
    assert _warnings_of(ragged.batch(8, 6, 0), ragged.step, dp=2) == []  # no padding
    alike = _padded()
    alike["labels"][:] = alike["labels"][3]
    assert _warnings_of(alike, ragged.step, dp=2) == []
    assert _warnings_of(_padded(), ragged.step, dp=2, mean="batch") == []


STRATEGIES: list[dict[str, Any]] = [
    {"pp": 2, "microbatches": 4},
    {"dp": 2, "zero": 3, "microbatches": 2},
]


def _assert_whole_batch(
    program: Any, model: nn.Module, step: Any, batches: list[Any], bound: float
) -> None:
    """Training equals a loop on one device that takes each batch as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = program.lower(optimizer=piper.sgd(lr=0.1, momentum=0.9))
    load_initial(model, job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with job.launch("loopback") as run:
        for batch in batches:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            assert run.step(batch).loss == pytest.approx(loss.item(), rel=bound)
        for name, param in run.parameters().items():
            wanted = model.get_parameter(name).detach()
            assert float((param - wanted).norm()) <= bound * float(wanted.norm()), name


@pytest.mark.parametrize("options", STRATEGIES, ids=["pp2", "dp2 zero 3"])
def test_with_mean_batch_training_is_that_of_the_whole_batch(options: dict[str, Any]) -> None:
    """Also over batches of other shapes."""
    batches = [_padded(8, length, seed) for seed, length in enumerate((6, 6, 9))]
    program = piper.trace(_make_model, batches[0], ragged.step, mean="batch")
    program = program.apply(parallel(**options))
    model = _make_model()
    _assert_whole_batch(program, model, ragged.step, batches, 1e-12)
    with program.lower().launch("loopback") as run, torch.no_grad():
        load_initial(model, program.lower())
        for batch in batches:
            wanted = ragged.step(model, batch).item()
            assert run.evaluate(batch).loss == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("options", STRATEGIES, ids=["pp2", "dp2 zero 3"])
def test_a_llama_of_hugging_face_with_padded_labels(options: dict[str, Any]) -> None:
    """Its loss is inside of the model: shifted labels, logits in float32."""
    pytest.importorskip("transformers")
    tiny = zoo_hf.llama()
    torch.manual_seed(0)
    batches = [tiny.batch() for _ in range(2)]
    for batch in batches:
        for row in range(8):
            batch["labels"][row, 8 - row % 7 :] = -100
    program = piper.trace(tiny.make_model, batches[0], tiny.step).apply(parallel(**options))
    with pytest.warns(UserWarning, match=r"a mean over targets other than -100 \(.*\.py:\d+\)"):
        program.lower()
    program = piper.trace(tiny.make_model, batches[0], tiny.step, mean="batch")
    program = program.apply(parallel(**options))
    _assert_whole_batch(program, tiny.make_model(), tiny.step, batches, 1e-5)


def _two_terms(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ragged.step(model, batch) + 0.1 * model(batch["tokens"]).square().mean()


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), weight=torch.ones(11).double())


def _pair(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return ragged.step(model, batch), 1


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_two_terms, r"the loss is not one mean of F.cross_entropy \(.*test_means.py:\d+\)"),
        (_weighted, r"the loss weighs its targets \(.*test_means.py:\d+\)"),
        (_pair, r"but step returns \(sum, count\)"),
    ],
)
def test_other_losses_are_refused(step: Any, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        piper.trace(_make_model, _padded(), step, mean="batch")
    with pytest.raises(TraceError, match='legal: "microbatch" or "batch"'):
        piper.trace(_make_model, _padded(), step, mean="token")
