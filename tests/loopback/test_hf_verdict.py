"""Hugging Face's models, unmodified, are exact to float64, and a fault of one part in a million is seen
in the gradient of every tensor."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch

import piper
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verdict import Oracle, lift_program, verify
from tests.loopback.planted import planted
from tests.zoo_hf import ZOO

pytest.importorskip("transformers")
# ViT notes the kind of its labels in its configuration.
pytestmark = pytest.mark.filterwarnings("ignore:the traced code changes Python state")

LONG = "PIPER_LONG" in os.environ
# One with float32 inside, one with gradients that are zero by mathematics.
SLICE = (("llama", "pp"), ("bert", "pp"))
STRATEGIES: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "pp": {"pp": 2, "microbatches": 2}}
# A key's bias adds the same to all scores of a query, and softmax does not see it.
VANISHING = {"bert": ".key.bias", "vit": ".k_proj.bias", "opt": ".k_proj.bias"}
DOUBLE = ("bert", "vit", "whisper")  # the others compute some of themselves in float32


def _program(name: str, strategy: str) -> tuple[Program, list[Any]]:
    tiny = ZOO[name]()
    torch.manual_seed(0)
    batches = [doubled(tiny.batch()) for _ in range(2)]
    program = piper.trace(doubled_model(tiny.make_model), batches[0], tiny.step)
    return program.apply(parallel(**STRATEGIES[strategy])), batches


@pytest.mark.parametrize(("name", "strategy"), [*product(ZOO, STRATEGIES)] if LONG else SLICE)
def test_exact(name: str, strategy: str) -> None:
    program, batches = _program(name, strategy)
    verdict = verify(program, batches)
    assert verdict.exact, verdict
    assert verdict.proof.oracle.dtype == "float64"
    assert verdict.proof.errors.bounds.gradient == 1e-10
    assert bool(verdict.islands) == bool(verdict.as_written) == (name not in DOUBLE)
    rounded = {r.name.split(" in ")[0] for r in verdict.proof.errors.rounded}
    assert all(tensor.endswith(VANISHING.get(name, "none")) for tensor in rounded), rounded


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ZOO if LONG else ["llama"])
def test_each_fault_is_seen(name: str) -> None:
    program, batches = _program(name, "pp")
    oracle = Oracle(program if name in DOUBLE else lift_program(program), batches[:1])
    gradients = oracle.reference.gradients[0]
    faults = [("gradient", tensor) for tensor in gradients]
    first, *_, last = gradients
    faults += [("loss", ""), ("update", first), ("update", last)]
    for what, tensor in faults:
        with planted(what, tensor), oracle.job.launch("loopback") as run:
            errors = oracle.errors_of(run)
        if what == "gradient" and tensor.endswith(VANISHING.get(name, "none")):
            assert errors.exact, errors  # there is nothing to be wrong
            continue
        assert not errors.exact, (what, tensor)
        row = {"update": "parameter"}.get(what, what)
        assert errors.worst[row].startswith(tensor or "step 0"), errors
        assert 0.9e-6 < getattr(errors, row) < 1.1e-6, errors
