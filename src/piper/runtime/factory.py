"""factory: a user's optimizer and a model in; the parameter groups that it makes, as data, out."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import Call, PlanError, Source, did_you_mean, user_source
from piper.plan.optimizers import Grouping, Optimizer
from piper.plan.types import ParamGroup
from piper.runtime.torch_optimizers import (
    arguments_of,
    check_name,
    check_param_groups,
    plain,
    small_parameter,
)

Factory = Callable[[Any], Any]

LEGAL = (
    "piper.adamw(lr=...), piper.sgd(lr=...), or a function of parameters, or of the model, that makes "
    "a torch.optim optimizer or a list of them, such as partial(torch.optim.AdamW, lr=1e-3)"
)
_OF_MODEL = (
    "a function whose argument is called model: lambda model: torch.optim.AdamW(model.parameters()); "
    "others are given a list of the parameters"
)
_GROUPS = (
    "groups of the model's own parameters, each in one group at most; a scheduler goes to "
    "train(..., lr_schedule=...)"
)


def optimizers_of(given: Optimizer | Factory, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that a user wants for a model: of the whole model, or of its parameters."""
    if isinstance(given, Optimizer):
        return [_by_patterns(given, model)]
    made = given(model if _takes_model(given) else list(model.parameters()))
    return list(made) if isinstance(made, tuple | list) else [made]


def resolve_optimizer(
    given: Optimizer | Factory,
    model: nn.Module,
    params: Mapping[str, Tensor],
    *,
    trained: Collection[str],
) -> Grouping:
    """The parameter groups that an optimizer makes. A function of the user's is called with the model
    or its parameters, which are `params` by the names that a plan has for them; what it leaves out of
    those that are `trained`, or freezes, is in no group."""
    if not isinstance(given, Optimizer) and not callable(given):
        if isinstance(given, torch.optim.Optimizer):
            kind = type(given).__name__
            raise PlanError(
                f"optimizer is one {kind} of torch's, made of tensors that no rank will hold",
                legal=f"a function that makes it of the parameters that it is given: optimizer=lambda "
                f"params: torch.optim.{kind}(params, ...)",
            )
        raise PlanError(f"optimizer is {given!r}", legal=LEGAL)
    if isinstance(given, Optimizer) and not given.groups:
        group = ParamGroup(given.name, given.options)
        check_param_groups([group])
        return Grouping((group,), {name: 0 for name in params if name in trained})
    if isinstance(_function(given), type):  # torch's own, which takes all parameters alike
        (made,) = _called(given, lambda: [given([small_parameter()])])  # type: ignore[operator]
        return Grouping(
            (_group(given, made, 0, 0),), {name: 0 for name in params if name in trained}
        )
    before = {name: param.requires_grad for name, param in params.items()}
    try:
        optimizers = _called(given, lambda: optimizers_of(given, model))
        frozen = {n for n, param in params.items() if before[n] and not param.requires_grad}
        unfrozen = [n for n, param in params.items() if param.requires_grad and not before[n]]
    finally:
        for name, param in params.items():
            param.requires_grad_(before[name])
    if unfrozen:
        raise PlanError(
            f"{_described(given)} has {_listed(unfrozen)} require a gradient, which is too late",
            legal="requires_grad_(True) in the function given to trace",
        )
    problem = _wrong_tensors(optimizers, params)
    if problem:
        raise PlanError(f"{_described(given)} {problem}", legal=_GROUPS)
    groups = [group for made in optimizers for group in made.param_groups]
    place = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
    of = {
        name: place[id(param)]
        for name, param in params.items()
        if name in trained and name not in frozen and id(param) in place
    }
    if not of:
        raise PlanError(f"{_described(given)} leaves out all that is trained", legal=_GROUPS)
    left_out = [name for name in params if name in trained and name not in frozen | of.keys()]
    if left_out:
        warnings.warn(
            f"{_described(given)} leaves out {_listed(left_out)}, so that they stay as they are: give "
            "them to an optimizer, or freeze them there (requires_grad_(False)) to say so",
            stacklevel=6,  # of lower, which is wrapped
        )
    records = [
        _group(given, made, number, index)
        for number, made in enumerate(optimizers)
        for index in range(len(made.param_groups))
    ]
    return Grouping(tuple(records), of)


def at_rate(given: Optimizer | Factory, lr: float) -> Optimizer | Factory:
    """The same optimizer with another learning rate, which all of its groups must have in common."""
    if isinstance(given, Optimizer) and not given.groups:
        return Optimizer(given.name, {**given.options, "lr": lr})
    if isinstance(given, Optimizer) or not isinstance(_function(given), type):
        return _AtRate(given, lr)
    named: Callable[..., Any] = given
    return partial(named, lr=lr)


@dataclass(frozen=True)
class _AtRate:
    given: Any
    lr: float

    def __call__(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        made = optimizers_of(self.given, model)
        groups = [group for one in made for group in one.param_groups]
        rates = sorted({plain(group["lr"]) for group in groups})
        if len(rates) > 1:
            raise PlanError(
                f"one lr for groups that have {', '.join(map(str, rates))}",
                legal="the lr of each group where the optimizer is made",
            )
        for group in groups:
            group["lr"] = self.lr
        return made


def _called(
    given: Optimizer | Factory, make: Callable[[], list[Any]]
) -> list[torch.optim.Optimizer]:
    """What the user's function makes, if a plan can say what it is."""
    try:
        made = make()
    except PlanError:
        raise
    except Exception as error:
        takes_list = isinstance(error, AttributeError) and isinstance(error.obj, list)
        raise PlanError(
            f"{_described(given)} failed: {error}", legal=_OF_MODEL if takes_list else LEGAL
        ) from error
    if not made:
        raise PlanError(f"{_described(given)} made no optimizer", legal=LEGAL)
    for one in made:
        name = type(one).__name__
        if type(one) is not getattr(torch.optim, name, None):
            what = "returns nothing" if name == "NoneType" else f"made a {name}"
            raise PlanError(f"{_described(given)} {what}", legal=LEGAL)
        check_name(name)
        problem = _wrong_step(one)
        if problem:
            raise PlanError(f"{_described(given)} {problem}", legal=_GROUPS)
    return made


def _wrong_tensors(
    optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, Tensor]
) -> str:
    """What optimizers hold that they cannot step, or would step twice."""
    names = {id(param): name for name, param in params.items()}
    seen: set[int] = set()
    for made in optimizers:
        for group in made.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    return "holds tensors that are no parameters of the model"
                if id(param) in seen:
                    return f"holds {names[id(param)]} twice"
                seen.add(id(param))
    return ""


def _wrong_step(made: torch.optim.Optimizer) -> str:
    """What an optimizer does in a step beside what its class does."""
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        return "adds hooks to the optimizer's step"
    if "step" in vars(made):  # as a scheduler does
        return "replaces the optimizer's step"
    return ""


def _group(
    given: Optimizer | Factory, made: torch.optim.Optimizer, number: int, index: int
) -> ParamGroup:
    """A group as data: the arguments that make it again, without those that are torch's defaults."""
    group, taken = made.param_groups[index], arguments_of(type(made))
    for key, value in group.items():
        known = key in taken or key in ("params", "param_names") or value == made.defaults.get(key)
        if not known and not (key == "name" and isinstance(value, str)):
            raise PlanError(
                f"{_described(given)} gives group {index} {key!r}, which {type(made).__name__} "
                f"does not take{did_you_mean(key, list(taken))}",
                legal=f'{", ".join(taken)}; or "name", a text',
            )
    options = {key: plain(group[key]) for key in made.defaults if key in taken}
    changed = {key: value for key, value in options.items() if value != taken[key]}
    return ParamGroup(type(made).__name__, changed, number, group.get("name", ""))


def _by_patterns(given: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Groups of the parameters that match each pattern, the first that does; then the others."""
    check_name(given.name)
    call = Call("lower", user_source())
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for pattern, options in given.groups.items():
        matching = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(
                f"no parameter matches {pattern!r}, or an earlier pattern took all that do",
                call=call,
                legal=_listed(list(named)) or "no pattern: all parameters are taken",
            )
        params = [named.pop(name) for name in matching]
        groups.append({"params": params, "name": pattern, **options})
    groups += [{"params": list(named.values())}] if named else []
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, given.name)(groups, **given.options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"{given.name} does not take {given.options} with groups: {error}",
            call=call,
            legal=f"the arguments of torch.optim.{given.name}",
        ) from None
    return made


def _takes_model(given: Factory) -> bool:
    """Whether a function's first argument is called `model`, or annotated as a module."""
    try:
        taken = inspect.signature(given).parameters.values()
        with contextlib.suppress(NameError):  # an annotation that only a type checker imports
            taken = inspect.signature(given, eval_str=True).parameters.values()
    except (TypeError, ValueError):  # made in C
        return False
    first = next(iter(taken), None)
    if first is None or first.name == "model":
        return first is not None
    return isinstance(first.annotation, type) and issubclass(first.annotation, nn.Module)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _function(given: Any) -> Any:
    while isinstance(given, partial | _AtRate):
        given = given.func if isinstance(given, partial) else given.given
    return given


def _described(given: Any) -> str:
    """The factory and, if it is Python code, its line."""
    if isinstance(given, Optimizer):
        source = user_source()
        return f"piper's {given.name}" + (f" ({source})" if source else "")
    function = _function(given)
    method = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None) or getattr(method, "__code__", None)
    if code is None:
        return "the optimizer's factory"
    return f"the optimizer's factory ({Source(code.co_filename, code.co_firstlineno)})"
