"""Optimizers by name: what a plan can say of an optimizer without holding one."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from piper.errors import ArgumentError, Call, RunError, naming_arguments, user_source
from piper.plan.types import ParamGroup

SCALAR_BYTES = 4  # torch counts steps in float32


class Optimizer(msgspec.Struct, frozen=True):
    """A `torch.optim` class by name, and its arguments; `groups` has others for the parameters whose
    names match a pattern, the first that does."""

    name: str
    options: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}


class Grouping(msgspec.Struct, frozen=True):
    """All parameter groups, and the one that each trained parameter is in."""

    groups: tuple[ParamGroup, ...]
    of: dict[str, int]


@naming_arguments
def sgd(lr: float, *, groups: Mapping[str, dict[str, Any]] = {}, **options: Any) -> Optimizer:
    """`torch.optim.SGD` with these arguments; `groups` as in `adamw`."""
    return Optimizer("SGD", {"lr": lr, **options}, _patterns("sgd", groups))


@naming_arguments
def adamw(
    lr: float = 1e-3, *, groups: Mapping[str, dict[str, Any]] = {}, **options: Any
) -> Optimizer:
    """`torch.optim.AdamW` with these arguments.

    `groups={"*.bias": {"weight_decay": 0}}` has others for parameters whose names match a pattern; the
    first that matches counts.
    """
    return Optimizer("AdamW", {"lr": lr, **options}, _patterns("adamw", groups))


def _patterns(name: str, groups: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The groups of an optimizer, if they are patterns, each with options by their names."""
    given = groups.items() if isinstance(groups, Mapping) else [(None, None)]
    for pattern, options in given:
        named = isinstance(options, Mapping) and all(isinstance(each, str) for each in options)
        if not isinstance(pattern, str) or not named:
            raise ArgumentError(
                f"groups={reprlib.repr(groups)}",
                call=Call(name, user_source()),
                legal='options by patterns of names, such as groups={"*.bias": {"weight_decay": 0}}',
            )
    return dict(groups)


# Per class of torch.optim that treats every element alone, what it keeps from step to step for a
# parameter: tensors of its shape, and plain numbers, by torch's own names.
_Kept = Callable[[dict[str, Any]], tuple[tuple[str, ...], tuple[str, ...]]]


def _adam(o: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    largest = ("max_exp_avg_sq",) if o.get("amsgrad") else ()
    return ("exp_avg", "exp_avg_sq", *largest), ("step",)


def _rmsprop(o: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    momentum = ("momentum_buffer",) if o.get("momentum") else ()
    return ("square_avg", *momentum, *(("grad_avg",) if o.get("centered") else ())), ("step",)


_STATE: dict[str, _Kept] = {
    "ASGD": lambda o: (("ax",), ("step", "eta", "mu")),
    "Adadelta": lambda o: (("square_avg", "acc_delta"), ("step",)),
    "Adagrad": lambda o: (("sum",), ("step",)),
    "Adam": _adam,
    "AdamW": _adam,
    "Adamax": lambda o: (("exp_avg", "exp_inf"), ("step",)),
    "NAdam": lambda o: (("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    "RAdam": lambda o: (("exp_avg", "exp_avg_sq"), ("step",)),
    "RMSprop": _rmsprop,
    "Rprop": lambda o: (("prev", "step_size"), ("step",)),
    "SGD": lambda o: (("momentum_buffer",) if o.get("momentum") else (), ()),
}
# Those that look at a whole tensor, and at what of it.
WHOLE = {
    "Adafactor": "averages over rows, columns and all of a parameter",
    "Muon": "orthogonalises the whole matrix of a parameter",
}
KNOWN = (*_STATE, *WHOLE)


StateForm = Literal["elements", "number", "own"]


def state_pieces(group: ParamGroup, shape: tuple[int, ...]) -> list[tuple[str, StateForm]]:
    """What is kept for a parameter, by name: a number for each element, one number, or a tensor of a
    shape of its own."""
    if group.optimizer == "Muon":
        return [("momentum_buffer", "elements")]
    if group.optimizer == "Adafactor":
        if len(shape) < 2:
            return [("variance", "elements"), ("step", "number")]
        return [("row_var", "own"), ("col_var", "own"), ("step", "number")]
    tensors, numbers = _STATE[group.optimizer](group.options)
    return [*((name, "elements") for name in tensors), *((name, "number") for name in numbers)]


def state_size(group: ParamGroup, shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements of the parameter's dtype, and plain numbers, that are kept for a parameter."""
    forms = [form for _, form in state_pieces(group, shape)]
    elements = forms.count("elements") * math.prod(shape)
    if "own" in forms:  # averages over rows and over columns
        elements += math.prod(shape[:-1]) + math.prod((*shape[:-2], *shape[-1:]))
    return elements, forms.count("number")


def check_planned(group: ParamGroup, options: Mapping[str, Any]) -> None:
    """Raise RunError if with these options more is kept for a parameter than is planned."""
    planned = {name for name, _ in state_pieces(group, ())}
    changed = msgspec.structs.replace(group, options={**group.options, **options})
    more = [name for name, _ in state_pieces(changed, ()) if name not in planned]
    if more:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise RunError(
            f"{group.optimizer} would keep {', '.join(more)} with {given}, which is not planned",
            legal="an optimizer that has it from the start, such as SGD(..., momentum=0.9)",
        )
