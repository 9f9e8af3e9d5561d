"""Mistakes of a first hour, beside those of tests/error: cells, dtypes, globals, process groups."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import piper
from piper.bodies.dtype_watch import DtypeWatch, WrongDtypes
from piper.strategies import parallel

CELL = "<ipython-input-3-fabc7a005c5b>"


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


BATCH = {"x": torch.ones(8, 6)}


def model() -> nn.Module:
    return nn.Linear(6, 3)


def test_a_cell_of_a_notebook_is_the_users_code() -> None:
    lines = ["def step(model, batch):\n", "    return model(batch['z']).mean()\n", "trace(step)\n"]
    linecache.cache[CELL] = (len("".join(lines)), None, lines, CELL)
    code = compile("".join(lines), CELL, "exec")
    with pytest.raises(piper.PiperError) as caught:
        exec(code, {"trace": lambda step: piper.trace(model, BATCH, step)})
    assert f"the step raises KeyError at {CELL}:2: z" in str(caught.value)
    lines = ["\n", "trace(1)\n"]
    with pytest.raises(piper.PiperError) as caught:
        exec(compile("".join(lines), CELL, "exec"), {"trace": piper.trace})
    assert f"trace ({CELL}:2): missing a required argument" in str(caught.value)


SQUARE, HALF = torch.ones(4, 4), torch.ones(4, 4).half()
ZEROS = torch.zeros(4, dtype=torch.int64)
UNLIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: torch.mm(a, b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "linear": lambda a, b: F.linear(a, b),
    "linear with a bias": lambda a, b: F.linear(a, a, b[0]),
    "matmul": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "index_put": lambda a, b: a.index_put((ZEROS,), b),
    "index_put_": lambda a, b: a.clone().index_put_((ZEROS,), b),
    "index_add": lambda a, b: a.index_add(0, ZEROS, b),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, ZEROS.to(torch.int32 if b is HALF else None)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_dtypes_that_torch_refuses_are_refused_on_fake_tensors(name: str) -> None:
    """What real tensors refuse, and nothing that they take."""
    call = UNLIKE[name]
    call(SQUARE, SQUARE)
    with pytest.raises(RuntimeError):
        call(SQUARE, HALF)
    with FakeTensorMode(allow_non_fake_inputs=True), DtypeWatch():
        call(SQUARE, SQUARE)
        with pytest.raises(WrongDtypes):
            call(SQUARE, HALF)


@dataclass
class Rows:
    x: Tensor


def test_a_dataclass_that_torch_knows_is_a_batch() -> None:
    torch.export.register_dataclass(Rows)
    losses = []
    for batch, loss in (
        (BATCH, step),
        (Rows(BATCH["x"]), lambda model, batch: step(model, {"x": batch.x})),
    ):
        job = piper.trace(model, batch, loss).apply(parallel(dp=2, microbatches=2)).lower()
        with job.launch("loopback") as run:
            losses.append([run.step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]


seen: list[Tensor] = []
count = 0


def test_a_global_that_the_step_changes_is_named() -> None:
    def noting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        global count
        count += 1
        loss = step(model, batch)
        seen.append(loss.detach())
        return loss

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        piper.trace(model, BATCH, noting)
    [text] = [str(w.message) for w in said if "Python state" in str(w.message)]
    assert ": a global of tests.null.test_first_mistakes (" in text.replace("_dot_", ".")
    assert ", seen (" in text and "__import" not in text


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_communication_is_refused_where_there_is_a_process_group(group: None) -> None:
    """As under torchrun: torch records it, and every microbatch would do it."""

    def over_ranks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = step(model, batch)
        dist.all_reduce(loss)
        return loss

    with pytest.raises(piper.PiperError) as caught:
        piper.trace(model, BATCH, over_ranks)
    line = over_ranks.__code__.co_firstlineno + 2
    assert f"all_reduce communicates (tests/null/test_first_mistakes.py:{line})" in str(
        caught.value
    )
    assert "no communication in the step" in (caught.value.legal or "")


def test_a_job_and_a_run_have_no_others_words() -> None:
    job = piper.trace(model, BATCH, step).lower()
    assert not hasattr(job, "_private") and not hasattr(job, "nonsense")
    with pytest.raises(AttributeError, match=r"piper\.train\(job, data, steps=\.\.\.\)"):
        _ = job.train
    with pytest.raises(AttributeError, match=r"with job\.launch\(\) as run: run\.predict"):
        _ = job.predict
