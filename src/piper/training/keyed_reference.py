"""The user's own step in eager mode, whose random operations draw from the keys that a plan uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from piper.api.job import Job
from piper.bodies.operators import draws_random
from piper.bodies.random.keyed import Keyed
from piper.errors import RunError
from piper.frontend.capture.random_ops import Draw, draws_of
from piper.plan.keys import key_of

_LEGAL = "random operations in the same order in every step, whatever the step's Python state"


def eager_step(job: Job, model: nn.Module) -> Callable[[Any, int, int], Any]:
    """A function of (rows, step, global microbatch) that calls the user's step on the module."""
    plan, source = job.plan, job.source
    if not any(slot.kind == "key" for rank_class in plan.classes for slot in rank_class.slots):

        def plain(rows: Any, step: int, microbatch: int) -> Any:
            with _without_checkpoints():
                return source.step(model, rows)

        return plain
    pieces = plan.num_data_ranks * plan.num_microbatches
    draws = draws_of(source.captured(source.batch_size // pieces))
    num_keys = 1 + max(draw.index for draw in draws if draw.index is not None)

    def run(rows: Any, step: int, microbatch: int) -> Any:
        keys = [
            key_of(plan.seed, step=step, index=index, microbatch=microbatch)
            for index in range(num_keys)
        ]
        with _KeyedInOrder(torch.tensor(keys), draws) as mode, _without_checkpoints():
            result = source.step(model, rows)
        mode.end()
        return result

    return run


@contextlib.contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Checkpointed code runs once. Made again in a backward, it would draw without any key, in dtypes
    that nobody lifts, and by experts' kernels that take no float64."""
    checkpoint: Any = torch.utils.checkpoint
    with (
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _as_it_is),
        patch.object(checkpoint, "CheckpointFunction", _Plain),
    ):
        yield


def _as_it_is(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


class _KeyedInOrder(Keyed):
    """Every random operator draws from the key that it has in the trace; both meet them in one order."""

    def __init__(self, keys: Tensor, expected: Sequence[Draw]) -> None:
        super().__init__(keys)
        self.expected = expected
        self.met = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs or {}):
            draw = self._next(func)
            if draw.index is None:  # nothing depends on it
                return func(*args, **(kwargs or {}))
            self.position = draw.index
            if draw.nth == 0:
                self.draws = 0
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _next(self, operator: Any) -> Draw:
        if self.met == len(self.expected):
            raise RunError(
                f"in eager mode the step also draws by {operator}, its {self.met + 1}. random "
                f"operator; its trace has {self.met}",
                legal=_LEGAL,
            )
        draw = self.expected[self.met]
        self.met += 1
        if draw.operator is not operator:
            raise RunError(
                f"in eager mode the step's {self.met}. random operator is {operator}, in its trace "
                f"it is {draw.operator} ({draw.source})",
                legal=_LEGAL,
            )
        return draw

    def end(self) -> None:
        """All draws of the trace must have been met."""
        if self.met < len(self.expected):
            draw = self.expected[self.met]
            raise RunError(
                f"in eager mode the step has {self.met} random operators, its trace "
                f"{len(self.expected)}; the first that is missing is {draw.operator} ({draw.source})",
                legal=_LEGAL,
            )
