"""LoRA by peft, unmodified: only adapters are trained, exactly, and nothing is kept for the rest."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.verdict import verify
from piper.training.verify import compare, load_initial, train_one_device
from tests import zoo_hf
from tests.zoo import CASES, batches_of

peft = pytest.importorskip("peft")
CASE = CASES["moe"]
DEGREES: dict[str, dict[str, Any]] = {
    "zero 0": {"dp": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2, "schedule": "zb_h1"},
    "ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "buckets": {"pp": 2, "dp": 2, "zero": 3, "bucket_size": "1KiB"},
}


def adapted() -> nn.Module:
    """The frozen model with adapters on its linear layers; both halves start away from zero."""
    config = peft.LoraConfig(r=2, target_modules=["qkv", "mlp"], init_lora_weights=False)
    return peft.get_peft_model(CASE.make_model(), config).double()


@cache
def _program() -> Program:
    return piper.trace(adapted, CASE.batch(0), CASE.step)


def lora_plus(model: nn.Module) -> torch.optim.Optimizer:
    """Larger steps for the second halves, as LoRA+ has it; all parameters are given, frozen ones too."""
    named = dict(model.named_parameters())
    second = [p for name, p in named.items() if "lora_B" in name]
    others = [p for name, p in named.items() if "lora_B" not in name]
    return torch.optim.AdamW([{"params": others}, {"params": second, "lr": 5e-2}], lr=5e-3)


OPTIMIZERS: dict[str, Any] = {"plain": piper.adamw(lr=1e-2), "groups": lora_plus}


def _job(degrees: str, optimizer: str) -> Job:
    options = DEGREES[degrees]
    strategy = parallel(microbatches=8 // options.get("dp", 1), **options)
    return _program().apply(strategy).lower(optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("degrees", DEGREES)
def test_adapters_train_like_one_device(degrees: str, optimizer: str) -> None:
    job = _job(degrees, optimizer)
    model = adapted()
    load_initial(model, job)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    reference = train_one_device(job, batches_of("moe"))
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches_of("moe"), reference)
        after, state, gradients = run.parameters(), run.optimizer_state(), run.gradients()
    assert errors.exact, errors
    assert state.keys() == gradients.keys() == adapters
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, after[n])}
    assert moved == adapters


def test_only_adapters_take_optimizer_memory() -> None:
    peaks = _job("zero 0", "plain").report.peaks
    model = adapted()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num = sum(p.requires_grad for p in model.parameters())
    assert peaks[0].kept["optimizer"] == 2 * 8 * trained + 4 * num  # two averages, a step each


def test_a_language_model_of_hugging_face_with_adapters() -> None:
    """By the oracle of `piper verify`, which lifts its norms and its loss to float64."""
    pytest.importorskip("transformers")
    tiny = zoo_hf.llama()

    def make() -> nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(tiny.make_model(), config).double()

    torch.manual_seed(0)
    batches = [tiny.batch() for _ in range(3)]
    program = piper.trace(make, batches[0], tiny.step)
    scheduled = program.apply(parallel(pp=2, dp=2, zero=3, microbatches=2))
    verdict = verify(scheduled, batches)
    assert verdict.exact and verdict.proof.oracle.dtype == "float64", verdict
    job = scheduled.lower(optimizer=piper.sgd(lr=2.0))
    with job.launch("loopback") as run:
        start = run.parameters()
        run.step(batches[0])
        after, state = run.parameters(), run.optimizer_state()
    moved = {name for name, value in start.items() if not torch.equal(value, after[name])}
    assert moved == state.keys() and moved and all("lora_" in name for name in moved)
