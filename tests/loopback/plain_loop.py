"""A training loop as anybody writes it, on one device with the weights of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from piper.api.job import Job
from piper.runtime.factory import optimizers_of
from piper.training.verify import load_initial
from tests.zoo import Case

Optimizers = list[torch.optim.Optimizer]


class PlainLoop:
    """Steps a model by the job's own optimizers; `after` is called after each step, `before` before."""

    def __init__(self, job: Job, case: Case, model: nn.Module | None = None) -> None:
        self.case = case
        self.clip = job.plan.clip
        self.pieces = job.plan.num_data_ranks * job.plan.num_microbatches
        self.model = model or case.model()
        load_initial(self.model, job)
        self.optimizers: Optimizers = optimizers_of(job.optimizer, self.model)

    def train(self, batches: list[Any], after: Callable[[], Any] = lambda: None) -> None:
        for batch in batches:
            for piece in range(self.pieces):
                rows = {key: leaf.chunk(self.pieces)[piece] for key, leaf in batch.items()}
                (self.case.step(self.model, rows) / self.pieces).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            for optimizer in self.optimizers:
                optimizer.step()
            after()
            self.model.zero_grad()
