"""factory: what a user gives as an optimizer in, its name and arguments out: a plan is data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import PlanError, Source
from piper.plan.optimizers import KNOWN
from piper.plan.types import Optimizer

Factory = Callable[[Any], torch.optim.Optimizer]

LEGAL = (
    "piper.adamw(lr=...), piper.sgd(lr=...), or a function of parameters that makes a torch.optim "
    "optimizer, such as partial(torch.optim.AdamW, lr=1e-3)"
)
_ONE_GROUP = (
    "one group with all parameters that are trained, such as lambda params: torch.optim.AdamW(params); "
    "a scheduler goes to train(..., lr_schedule=...)"
)
_REFUSED = {
    "LBFGS": "it computes the loss several times in a step",
    "SparseAdam": "gradients are dense here",
}


def resolve_optimizer(
    given: Optimizer | Factory, params: Mapping[str, Tensor], *, trained: Collection[str]
) -> Optimizer:
    """The optimizer as data. A function of the user's is called with the model's parameters, all in
    their order, to see what it makes; those that are `trained` must be in it."""
    if isinstance(given, Optimizer):
        check_optimizer(given)
        return given
    if not callable(given):
        raise PlanError(f"optimizer is {given!r}", legal=LEGAL)
    if isinstance(_function(given), type):  # torch's own, which takes all parameters alike
        params = trained = {"parameter": _small()}
    try:
        made: Any = given(list(params.values()))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{_described(given)} failed: {error}", legal=LEGAL) from error
    name = type(made).__name__
    if type(made) is not getattr(torch.optim, name, None):
        raise PlanError(f"{_described(given)} made a {name}", legal=LEGAL)
    _check_name(name)
    problem = _wrong_tensors(made, params, trained) or _wrong_step(made)
    if problem:
        raise PlanError(f"{_described(given)} {problem}", legal=_ONE_GROUP)
    group, _ = _stepping_groups(made, params, trained)[0]
    return Optimizer(name, _options(made, group))


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise PlanError unless torch makes an optimizer of this."""
    _check_name(optimizer.name)
    try:
        make_optimizer(optimizer, [_small()])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"{optimizer.name} does not take {optimizer.options}: {error}",
            legal=f"the arguments of torch.optim.{optimizer.name}",
        ) from None


def _small() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2))


def _wrong_tensors(
    made: torch.optim.Optimizer, params: Mapping[str, Tensor], trained: Collection[str]
) -> str:
    """How what an optimizer steps differs from all trained parameters under the same arguments."""
    held = {id(param) for group in made.param_groups for param in group["params"]}
    if not held <= {id(param) for param in params.values()}:
        return "holds tensors that are no parameters of the model"
    left_out = [n for n, param in params.items() if n in trained and id(param) not in held]
    if left_out:
        return f"leaves out {_listed(left_out)}"
    (first, some), *others = _stepping_groups(made, params, trained)
    for (group, more), key in product(others, made.defaults):
        one, other = plain(first.get(key)), plain(group.get(key))
        if one != other:
            return (
                f"makes several groups: {key} is {one} for {_listed(some)}, but {other} for "
                f"{_listed(more)}"
            )
    return ""


def _stepping_groups(
    made: torch.optim.Optimizer, params: Mapping[str, Tensor], trained: Collection[str]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Groups with their trained parameters; a group of frozen ones does nothing."""
    names = {id(param): name for name, param in params.items() if name in trained}
    groups = [
        (group, [names[id(param)] for param in group["params"] if id(param) in names])
        for group in made.param_groups
    ]
    return [(group, stepped) for group, stepped in groups if stepped]


def _wrong_step(made: torch.optim.Optimizer) -> str:
    """What an optimizer does in a step beside what its class does."""
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        return "adds hooks to the optimizer's step"
    if "step" in vars(made):  # as a scheduler does
        return "replaces the optimizer's step"
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _function(given: Any) -> Any:
    while isinstance(given, partial):
        given = given.func
    return given


def _described(given: Any) -> str:
    """The factory and, if it is Python code, its line."""
    function = _function(given)
    method = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None) or getattr(method, "__code__", None)
    if code is None:
        return "the optimizer's factory"
    return f"the optimizer's factory ({Source(code.co_filename, code.co_firstlineno)})"


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


def _options(made: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make it again, without those that are torch's defaults."""
    taken = inspect.signature(type(made).__init__).parameters
    given = {key: plain(group[key]) for key in made.defaults if key in taken}
    return {key: value for key, value in given.items() if value != taken[key].default}


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """An optimizer's step by itself, for callers without gradients: what torch wraps it in runs hooks,
    of which there are none, and imports torch's compiler."""
    return partial(inspect.unwrap(type(optimizer).step), optimizer)
