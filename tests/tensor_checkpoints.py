"""A transformer that is one chunk, and the same with layers that its own code checkpoints."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import piper
from piper import where
from piper.api.job import Job
from tests.tensor_zoo import CASES, Model
from tests.zoo import ADAMW

CASE = CASES["dense"]


class Untagged(Model):
    """All layers in one chunk."""

    how: Any = None  # calls a layer

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, batch["route"]) if self.how is None else self.how(block, x, batch["route"])
        return self.head(self.norm(x))


class Checkpointed(Untagged):
    how = staticmethod(partial(checkpoint, use_reentrant=False))


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Untagged):
    """A policy says what is saved."""

    how = staticmethod(
        partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, _policy),
        )
    )


@cache
def program_of(kind: type[Untagged], layers: int = 4, dropout: float = 0.0) -> piper.Program:
    return piper.trace(
        lambda: kind(num_stages=layers, dropout=dropout).double(), CASE.batch(0), CASE.step
    )


def job_of(
    kind: type[Untagged] = Untagged,
    layers: int = 4,
    *,
    tp: int = 2,
    sp: bool = False,
    recompute: Any = None,
    dropout: float = 0.0,
) -> Job:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(tp=tp)
        s.place(where(), mesh.at())
        s.shard_tensor(where(), over="tp", sequence={"tokens": 1, "labels": 1} if sp else None)
        if recompute:
            s.recompute(where(), keep=recompute)

    return program_of(kind, layers, dropout).apply(strategy).lower(optimizer=ADAMW)
