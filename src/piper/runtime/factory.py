"""factory: what a user gives as an optimizer in, its name and arguments out: a plan is data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import PlanError
from piper.plan.optimizers import KNOWN
from piper.plan.types import Optimizer

Factory = Callable[[Any], torch.optim.Optimizer]

LEGAL = (
    "piper.adamw(lr=...), piper.sgd(lr=...), or a function of parameters that makes a torch.optim "
    "optimizer, such as partial(torch.optim.AdamW, lr=1e-3)"
)
_REFUSED = {
    "LBFGS": "it computes the loss several times in a step",
    "SparseAdam": "gradients are dense here",
}


def resolve_optimizer(given: Optimizer | Factory) -> Optimizer:
    """The optimizer as data. A factory is called with one small parameter, to see what it makes."""
    param = nn.Parameter(torch.zeros(2, 2))
    if isinstance(given, Optimizer):
        _check_name(given.name)
        try:
            make_optimizer(given, [param])
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"{given.name} does not take {given.options}: {error}",
                legal=f"the arguments of torch.optim.{given.name}",
            ) from None
        return given
    if not callable(given):
        raise PlanError(f"optimizer is {given!r}", legal=LEGAL)
    try:
        made: Any = given([param])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"the optimizer's factory failed: {error}", legal=LEGAL) from error
    name = type(made).__name__
    if type(made) is not getattr(torch.optim, name, None):
        raise PlanError(f"the optimizer's factory made a {name}", legal=LEGAL)
    _check_name(name)
    if [[id(p) for p in group["params"]] for group in made.param_groups] != [[id(param)]]:
        raise PlanError(
            "the optimizer's factory leaves parameters out, or puts them into several groups",
            legal="one group of all parameters that it is given",
        )
    return Optimizer(name, _options(made))


def make_optimizer(optimizer: Optimizer, params: Any) -> torch.optim.Optimizer:
    """The torch optimizer of these parameters."""
    made: torch.optim.Optimizer = getattr(torch.optim, optimizer.name)(params, **optimizer.options)
    return made


def plain(value: Any) -> Any:
    """A value of a parameter group as a plan keeps it: numbers, not tensors."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise PlanError(f"an optimizer's argument is {value}", legal="a number")
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(plain(v) for v in value)
    return value


def _check_name(name: str) -> None:
    reason = _REFUSED.get(name)
    if reason or name not in KNOWN or not hasattr(torch.optim, name):
        raise PlanError(
            f"torch.optim.{name} is not supported" + (f": {reason}" if reason else ""),
            legal=", ".join(known for known in KNOWN if hasattr(torch.optim, known)),
        )


def _options(made: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments that make it again, without those that are torch's defaults."""
    taken = inspect.signature(type(made).__init__).parameters
    group = made.param_groups[0]
    given = {key: plain(group[key]) for key in made.defaults if key in taken}
    return {key: value for key, value in given.items() if value != taken[key].default}


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """An optimizer's step by itself, for callers without gradients: what torch wraps it in runs hooks,
    of which there are none, and imports torch's compiler."""
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


def spare_compiler() -> None:
    """Optimizers turn torch's compiler off around other methods too, and import it for that, which takes
    as long as to start a run. A process that has not imported it has nothing to turn off."""
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        plain_method = getattr(method, "__wrapped__", None)
        if plain_method is not None:
            plain_method.__dynamo_disable = plain_method
