"""Arguments of trace: what a user gives as model, batch and step in; an error where it is none out."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from piper.bodies.leaves import batch_leaves
from piper.errors import TraceError
from piper.frontend.refuse.refusals import call_of


def check_arguments(make_model: Any, batch: Any, step: Any) -> None:
    """Raise where something else was given than a function that makes a model, a batch and a step."""
    if isinstance(make_model, nn.Module) or not callable(make_model):
        what = f"trace was given {_kind(make_model)}"
        if isinstance(make_model, nn.Module):
            what = f"trace was given a model, a {type(make_model).__name__}"
        raise TraceError(what, legal="a function that makes it: trace(Model, batch, step)")
    if not batch_leaves(batch):
        raise TraceError(
            f"the example batch is {_kind(batch)} and has no tensors",
            legal='a global batch of tensors with samples in dim 0, such as {"x": x, "y": y}',
        )
    if not callable(step):
        raise TraceError(f"step is {_kind(step)}", legal="a function step(model, batch)")
    names = _names(step)
    if names is not None and (len(names) != 2 or names == ["batch", "model"]):
        raise TraceError(
            f"step takes ({', '.join(names)})",
            call=call_of(step),
            legal="def step(model, batch): in this order, whatever they are called",
        )


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
