"""Mixtures of experts as Hugging Face has them: exact with their experts sharded, code untouched."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo_hf import EXPERTS, ZOO

pytest.importorskip("transformers")

# Those with biases, transposed weights and a gate of its own; shared experts and groups.
SLICE = ("gpt_oss",)
MORE = ("mixtral", "qwen3_moe", "deepseek_v3")
LONG = "PIPER_LONG" in os.environ


def _step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """On logits in float64; the models' own loss is computed in float32."""
    outputs = model(**batch)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())
    auxiliary = getattr(outputs, "aux_loss", None)
    return loss if auxiliary is None else loss + 0.01 * auxiliary


def _assert_exact(name: str, **degrees: Any) -> piper.Program:
    tiny = ZOO[name]()
    torch.manual_seed(0)
    batches = [tiny.batch() for _ in range(2)]
    program = piper.trace(lambda: tiny.make_model().double(), batches[0], _step)
    job = program.apply(parallel(microbatches=2, **degrees)).lower(optimizer=piper.adamw(lr=1e-3))
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=1) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors
    return program


@pytest.mark.parametrize("name", [*SLICE, *(MORE if LONG else ())])
def test_experts_are_sharded(name: str) -> None:
    program = _assert_exact(name, pp=2, dp=2, ep=2)
    experts = {node.tag("EP") for node in program.graph.nodes.values()} - {None}
    assert experts == set(range(len(experts)))
    inside = [v for n in program.graph.nodes.values() if n.tag("EP") is not None for v in n.inputs]
    weights = [v for v in inside if program.graph.values[v].role == "param"]
    assert weights
    assert all(program.graph.values[v].shape[0] == EXPERTS for v in weights)


@pytest.mark.skipif(not LONG, reason="minutes: PIPER_LONG=1 runs it")
@pytest.mark.parametrize("name", [*SLICE, *MORE])
def test_under_zero_3_and_zbv(name: str) -> None:
    _assert_exact(name, pp=2, dp=2, zero=3, schedule="zbv")


def test_the_users_configuration_is_as_it_was() -> None:
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = ZOO["gpt_oss"]().make_model()
    config, known = model.config, ALL_EXPERTS_FUNCTIONS.valid_keys()
    chosen = config._experts_implementation
    tiny = ZOO["gpt_oss"]()

    def tagged() -> nn.Module:  # as one had to say it: now it says the same
        return piper.tag(transformers.GptOssForCausalLM(config), EP="model.layers.*.mlp.experts")

    program = piper.trace(tagged, tiny.batch(), tiny.step)
    assert config._experts_implementation == chosen
    assert ALL_EXPERTS_FUNCTIONS.valid_keys() == known
    assert program.apply(parallel(dp=2, ep=2)).history


def test_counts_beyond_their_number_end_the_step() -> None:
    """bincount would give a longer result, which no trace can."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        counts = torch.bincount(batch["i"], minlength=3)
        return (model(batch["x"]).sum(0) * counts).mean()

    batch = {"x": torch.randn(4, 2), "i": torch.tensor([0, 2, 2, 1])}
    program = piper.trace(lambda: nn.Linear(2, 3), batch, step)
    with program.lower().launch("single") as run:
        reference = train_one_device(program.lower(), [batch])
        assert run.step(batch).loss == pytest.approx(reference.losses[0], rel=1e-6)
        with pytest.raises(RuntimeError, match="out of bounds"):
            run.step({**batch, "i": batch["i"] + 1})
