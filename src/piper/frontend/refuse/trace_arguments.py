"""Arguments of trace: what a user gives as model, batch and step in; an error where it is none out."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from piper.bodies.leaves import batch_leaves, batch_others, users_name
from piper.errors import TraceError
from piper.frontend.refuse.loop_code import refuse_clipping
from piper.frontend.refuse.refusals import call_of


def check_arguments(make_model: Any, batch: Any, step: Any) -> None:
    """Raise where something else was given than a function that makes a model, a batch and a step."""
    if isinstance(make_model, nn.Module) or not callable(make_model):
        what = f"trace was given {_kind(make_model)}"
        if isinstance(make_model, nn.Module):
            what = f"trace was given a model, a {type(make_model).__name__}"
        raise TraceError(what, legal="a function that makes it: trace(Model, batch, step)")
    if wanted := _required(make_model):
        name = getattr(make_model, "__name__", "make_model")
        raise TraceError(
            f"{name} takes {', '.join(wanted)}, but trace calls it without arguments",
            legal=f"trace(lambda: {name}(...), batch, step)",
        )
    _check_batch(batch)
    if not callable(step):
        raise TraceError(f"step is {_kind(step)}", legal="a function step(model, batch)")
    if inspect.iscoroutinefunction(step):
        raise TraceError(
            "step is an async function", call=call_of(step), legal="def step(model, batch):"
        )
    refuse_clipping(step, call_of(step))
    names = _names(step)
    if names is not None and (len(names) != 2 or names == ["batch", "model"]):
        raise TraceError(
            f"step takes ({', '.join(names)})",
            call=call_of(step),
            legal="def step(model, batch): in this order, whatever they are called",
        )


def _check_batch(batch: Any) -> None:
    for name, leaf in batch_others(batch).items():
        if isinstance(leaf, np.ndarray):
            raise TraceError(
                f"{users_name(name)} of the example batch is an array of numpy",
                legal="tensors: torch.from_numpy(array)",
            )
    if batch_leaves(batch):
        return
    legal = 'a global batch of tensors with samples in dim 0, such as {"x": x, "y": y}'
    if isinstance(batch, DataLoader):
        legal = "one batch of it: next(iter(loader))"
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        name = type(batch).__name__
        raise TraceError(
            f"the example batch is {_kind(batch)}, which torch does not look into",
            legal=f"torch.export.register_dataclass({name}) before it; or a dict, tuple or NamedTuple",
        )
    raise TraceError(f"the example batch is {_kind(batch)} and has no tensors", legal=legal)


def _required(make_model: Any) -> list[str]:
    """The arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(make_model).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _names(step: Any) -> list[str] | None:
    """What a step must be given; None where that cannot be known."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return [
        p.name
        for index, p in enumerate(parameters)
        if p.default is inspect.Parameter.empty or index < 2
    ]


def _kind(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
