"""Models of transformers at full size, on fake tensors: traced and lowered to 64 ranks, and measured."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

import piper
from piper.strategies import parallel

PP, DP, MICROBATCHES, ROWS, LENGTH = 8, 8, 8, 2, 128
# The shapes of Llama 3 8B and of Qwen3 30B-A3B.
LARGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama-3-8B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}


@dataclass(frozen=True)
class Measured:
    """CPU seconds, and the process's largest memory in bytes."""

    parameters: int
    trace: float
    lower: float
    peak: int


def measure(name: str) -> Measured:
    import transformers

    model, config, sizes = LARGE[name]

    def make_model() -> nn.Module:
        return getattr(transformers, model)(
            getattr(transformers, config)(use_cache=False, max_position_embeddings=8192, **sizes)
        )

    tokens = torch.zeros(ROWS * DP * MICROBATCHES, LENGTH, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    start = time.process_time()
    program = piper.trace(make_model, batch, lambda model, batch: model(**batch).loss)
    traced = time.process_time()
    strategy = parallel(pp=PP, dp=DP, zero=2, schedule="1f1b", microbatches=MICROBATCHES)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    lowered = time.process_time()
    tensors = (v for v in job.graph.values.values() if v.role == "param")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return Measured(
        sum(prod(value.shape) for value in tensors), traced - start, lowered - traced, peak
    )
