"""Hugging Face's models, unmodified, with their tensors cut: splits are found, training is exact."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch

import piper
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verdict import verify
from tests.zoo_hf import ZOO

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the traced code changes Python state")

LONG = "PIPER_LONG" in os.environ
DEGREES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "cp": {"cp": 2},
    "all": {"cp": 2, "tp": 2, "sp": True, "pp": 2, "microbatches": 2, "zero": 1},
}
SLICE = (
    ("llama", "sp"),
    ("qwen3", "tp"),
    ("gpt2", "sp"),
    ("qwen3_moe", "sp"),
    ("deepseek_v3", "tp"),
)
# Their sequences are no leaves of integers, have two kinds, or pass through scans along them.
WITHOUT_SEQUENCE = ("vit", "whisper", "t5", "mamba", "mamba2", "bert")
# Its one key head stays whole over tp: with two, sequences can be cut, too.
REFUSED = (("gpt_oss", "sp"), ("gpt_oss", "cp"), ("gpt_oss", "all"))
# Those that Megatron cuts, where a layer's names are.
MEGATRON = {
    "llama": {"self_attn.q_proj": 0, "self_attn.o_proj": 1, "mlp.gate_proj": 0, "mlp.up_proj": 0,
              "mlp.down_proj": 1},
    "qwen3": {"self_attn.q_proj": 0, "self_attn.o_proj": 1, "mlp.gate_proj": 0, "mlp.up_proj": 0,
              "mlp.down_proj": 1},
    "deepseek_v3": {"self_attn.q_b_proj": 0, "self_attn.kv_b_proj": 0, "self_attn.o_proj": 1},
}  # fmt: skip


def _cases() -> list[tuple[str, str]]:
    whole = [c for c in product(ZOO, DEGREES) if c[1] == "tp" or c[0] not in WITHOUT_SEQUENCE]
    return [c for c in whole if c not in REFUSED] if LONG else list(SLICE)


@pytest.mark.skipif(not LONG, reason="a minute: PIPER_LONG=1 runs it")
@pytest.mark.parametrize(("degrees", "axis"), [("sp", "tp"), ("cp", "cp")])
def test_a_parameter_with_two_kinds_of_readers_is_refused(degrees: str, axis: str) -> None:
    """Sinks of attention: their largest is taken on every rank, and joined to each one's own scores."""
    tiny = ZOO["gpt_oss"]()
    program = piper.trace(doubled_model(tiny.make_model), doubled(tiny.batch()), tiny.step)
    said = f"sinks is read along {axis} by code that is equal on all ranks and by code that differs"
    with pytest.raises(piper.errors.AxisError, match=said):
        program.apply(parallel(**DEGREES[degrees])).lower()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "degrees"), _cases())
def test_exact(name: str, degrees: str) -> None:
    tiny = ZOO[name]()
    torch.manual_seed(0)
    batches = [doubled(tiny.batch()) for _ in range(2)]
    program = piper.trace(doubled_model(tiny.make_model), batches[0], tiny.step)
    verdict = verify(program.apply(parallel(**DEGREES[degrees])), batches)
    assert verdict.exact, verdict
    assert verdict.proof.errors.bounds.gradient == 1e-10


@pytest.mark.parametrize("name", MEGATRON)
def test_splits_are_those_of_megatron(name: str) -> None:
    tiny = ZOO[name]()
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step).apply(parallel(tp=2))
    found = next(r.directive.params for r in program.history if r.directive.kind == "shard_tensor")
    assert found["model.embed_tokens.weight"] == 0 and found["lm_head.weight"] == 0
    for matrix, dim in MEGATRON[name].items():
        layers = [n for n in found if n.endswith(f"{matrix}.weight")]
        assert layers and all(found[n] == dim for n in layers), (matrix, found)
    for whole in ("q_a_proj", "kv_a_proj_with_mqa", "norm", "router", "gate.weight"):
        assert not any(whole in n for n in found if "gate_proj" not in n), (whole, found)
