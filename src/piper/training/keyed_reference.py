"""The one-device step of a program with random operations: the uncut graph, drawing from its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piper.api.job import Job
from piper.bodies.leaves import batch_leaves
from piper.frontend.capture import plain_name
from piper.frontend.random_ops import random_indexes, uncut
from piper.plan.keys import key_of


def draws(job: Job) -> bool:
    """Whether a job has random operations."""
    return any(slot.kind == "key" for found in job.plan.classes for slot in found.slots)


def keyed_step(job: Job, model: nn.Module) -> Callable[[Any, int, int], Any]:
    """A function of (rows, step, global microbatch) that does what the user's step does."""
    plan, source = job.plan, job.source
    pieces = plan.num_data_ranks * plan.num_microbatches
    capture, _ = source.at(source.batch_size // pieces)
    module = uncut(capture)
    num_keys = len(random_indexes(capture))
    named = (*model.named_buffers(), *model.named_parameters())
    tensors = {plain_name(name): tensor for name, tensor in named}

    def run(rows: Any, step: int, microbatch: int) -> Any:
        given: dict[str, Tensor] = tensors | batch_leaves(rows)
        keys = torch.tensor(
            [
                key_of(plan.seed, step=step, index=index, microbatch=microbatch)
                for index in range(num_keys)
            ]
        )
        inputs = [given[origin.name] for origin in capture.origins.values()]
        results = module(*inputs, keys)
        return results if capture.count is not None else results[0]

    return run
