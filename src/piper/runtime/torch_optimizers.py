"""Torch optimizers: a plan's parameter groups in, optimizers of `torch.optim` that step them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from piper.errors import PlanError
from piper.plan.optimizers import KNOWN
from piper.plan.types import ParamGroup

_REFUSED = {
    "LBFGS": "it computes the loss several times in a step",
    "SparseAdam": "gradients are dense here",
}


def make_optimizer(group: ParamGroup, params: Any) -> torch.optim.Optimizer:
    """The torch optimizer of these parameters, all in one group."""
    made: torch.optim.Optimizer = getattr(torch.optim, group.optimizer)(params, **group.options)
    return made


def check_param_groups(groups: Iterable[ParamGroup]) -> None:
    """Raise PlanError unless torch makes an optimizer of each."""
    for group in groups:
        check_name(group.optimizer)
        try:
            make_optimizer(group, [small_parameter()])
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"{group.optimizer} does not take {group.options}: {error}",
                legal=f"the arguments of torch.optim.{group.optimizer}",
            ) from None


def check_name(name: str) -> None:
    reason = _REFUSED.get(name)
    if reason or name not in KNOWN or not hasattr(torch.optim, name):
        raise PlanError(
            f"torch.optim.{name} is not supported" + (f": {reason}" if reason else ""),
            legal=", ".join(known for known in KNOWN if hasattr(torch.optim, known)),
        )


def small_parameter() -> nn.Parameter:
    """What every optimizer takes, to see what it makes of its arguments."""
    return nn.Parameter(torch.zeros(2, 2))


def arguments_of(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments that a class takes for a group, with their defaults."""
    taken = inspect.signature(kind.__init__).parameters.values()
    return {p.name: p.default for p in taken if p.name not in ("self", "params")}


def plain(value: Any) -> Any:
    """A value of a parameter group as a plan keeps it: numbers, not tensors or numpy's."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise PlanError(f"an optimizer's argument is {value}", legal="a number")
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(plain(v) for v in value)
    return value


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """An optimizer's step by itself, for callers without gradients: what torch wraps it in runs hooks,
    of which there are none, and imports torch's compiler."""
    return partial(inspect.unwrap(type(optimizer).step), optimizer)
