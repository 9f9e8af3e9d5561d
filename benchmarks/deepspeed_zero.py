"""DeepSpeed's ZeRO over data ranks, for peers.py where deepspeed is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch_variants import Ranked, Step
from transformer import Batch, step


def is_installed() -> bool:
    return find_spec("deepspeed") is not None


def deepspeed_zero(stage: int, ranked: Ranked, regime: str) -> Step:
    """Its engine with overlapping communication; with masters, bfloat16 parameters and float32 sums and
    reductions."""
    os.environ.setdefault("DS_ACCELERATOR", ranked.device.type)
    import deepspeed as ds

    ds.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    model = ranked.whole()
    sizes, num = ranked.sizes, ranked.sizes.microbatches // ranked.num_ranks
    config: dict[str, Any] = {
        "train_batch_size": sizes.rows * sizes.microbatches,
        "train_micro_batch_size_per_gpu": sizes.rows,
        "gradient_accumulation_steps": num,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_scatter": True,
        },
    }  # fmt: skip
    if ranked.device.type == "cuda":
        config["bf16"] = {"enabled": True}
    if ranked.device.type == "cuda" and regime == "masters":
        config |= {
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    optimizer = ranked.optimizer(model.parameters())
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def one(batch: Batch) -> float:
        total = torch.zeros((), device=ranked.device)
        for m in range(num):
            first = (ranked.rank * num + m) * sizes.rows
            part = {k: v[first : first + sizes.rows] for k, v in batch.items()}
            loss = step(engine, part)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / num
        return float(total)

    return one
