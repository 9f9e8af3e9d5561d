"""Torch optimizers: a plan's parameter groups in, optimizers of `torch.optim` that step them out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from piper.errors import PlanError, RunError, did_you_mean
from piper.plan.optimizers import KNOWN, check_planned
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


def checked_options(group: ParamGroup, options: Any) -> dict[str, Any]:
    """New values of a parameter group as a plan keeps them; raise RunError unless its optimizer takes
    them, and keeps no more with them than is planned."""
    if not isinstance(options, Mapping):
        raise RunError(
            f"options of a parameter group are {options!r}", legal='a mapping, such as {"lr": 3e-4}'
        )
    made = make_optimizer(group, [small_parameter()])
    legal = [key for key in made.defaults if key in made.param_groups[0]]
    strange = [key for key in options if key not in legal]
    if strange:
        hint = did_you_mean(str(strange[0]), legal)
        raise RunError(f"{group.optimizer} has no {strange[0]!r}{hint}", legal=", ".join(legal))
    new = {key: plain(value) for key, value in options.items()}
    wrong = "" if all(map(_is_finite, new.values())) else "it is not finite"
    try:
        make_optimizer(replace(group, options={**group.options, **new}), [small_parameter()])
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = str(error)
    if wrong:
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise RunError(
            f"{group.optimizer} does not take {shown}: {wrong}",
            legal=f"the arguments of torch.optim.{group.optimizer}",
        )
    check_planned(group, new)
    return new


def _is_finite(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return all(not isinstance(number, float) or math.isfinite(number) for number in numbers)


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
