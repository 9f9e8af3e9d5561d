"""Results of a step: what the user's function returns in, one flat tuple of tensors and their names out.

A loss leaves the captured graph as it is, its count and each metric in float64. A metric is one tensor
(sum, count), so that both travel together; its name stands in the graph, at the node that makes it. So
does that of a prediction, which has a row for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, fx, nn

from piper.bodies.captured_nodes import source_of, value_of
from piper.errors import TraceError
from piper.frontend.refuse.refusals import WRONG_METRIC, WRONG_PREDICTION, WRONG_RESULT

# Our keys among a node's annotations: the name of the metric, or prediction, that it makes.
METRIC, PREDICTION = "piper-metric", "piper-prediction"


@dataclass(frozen=True)
class PredictStep:
    """A user's function predict(model, batch), whose results are predictions."""

    step: Callable[[nn.Module, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.step(model, batch)


class WholePrediction(nn.Module):
    """The model and the user's predict as one module. Its loss means nothing: a step has one."""

    def __init__(self, model: nn.Module, predict: PredictStep) -> None:
        super().__init__()
        self.model = model
        self.predict = predict.step

    def forward(self, batch: Any) -> Any:
        result = self.predict(self.model, batch)
        if isinstance(result, Tensor):
            named = {"": result}
        elif isinstance(result, dict):
            pairs = enumerate(result.items())
            named = {f"key.{place}.{name}": tensor for place, (name, tensor) in pairs}
        elif isinstance(result, tuple | list):
            named = {f"place.{place}": tensor for place, tensor in enumerate(result)}
        else:
            raise TypeError(WRONG_PREDICTION)
        for tensor in named.values():
            if not isinstance(tensor, Tensor):
                raise TypeError(WRONG_PREDICTION)
        made = [_prediction(name, tensor) for name, tensor in named.items()]
        return torch.zeros_like(made[0], dtype=torch.float32).mean(), *made


def _prediction(name: str, tensor: Tensor) -> Tensor:
    with torch.fx.traceback.annotate({PREDICTION: f"={name}"}):
        return tensor.detach().clone()


class WholeStep(nn.Module):
    """The model and the user's step as one module, for Dynamo."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self, batch: Any) -> Any:
        result, metrics = loss_and_metrics(self.step(self.model, batch))
        if isinstance(result, Tensor):
            result = (result,)
        if not isinstance(result, tuple | list) or not isinstance(result[0], Tensor):
            raise TypeError(f"{WRONG_RESULT}, not {_kind(result)}")
        if others := [each for each in result[1:] if not isinstance(each, Tensor | int | float)]:
            raise TypeError(
                f"{WRONG_RESULT}, not a {type(result).__name__} with {_kind(others[0])}"
            )
        if len(result) > 1:
            large = [each for each in result if isinstance(each, Tensor) and each.numel() != 1]
            if large:
                shape = "x".join([str(size) for size in large[0].shape])
                raise TypeError(f"{WRONG_RESULT}, not a pair with a tensor of {shape} numbers")
        # A count may be a number, a buffer or the loss itself; here it becomes a tensor of its own.
        counts = [_zero(_scalar(result[0])) + _scalar(other) for other in result[1:]]
        made = [_metric(name, metric, result[0]) for name, metric in metrics.items()]
        return _scalar(result[0]), *counts, *made


def loss_and_metrics(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a step returns as its loss, or (sum, count), and its metrics by name."""
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], dict):
        return result[0], result[1]
    return result, {}


def _metric(name: str, made: Any, loss: Tensor) -> Tensor:
    if not isinstance(name, str):
        raise TypeError(f"{WRONG_METRIC}: {name!r}")
    total, count = made if isinstance(made, tuple | list) and len(made) == 2 else (made, 1)
    # A number of Python goes with the tensor beside it, and so to where that is made.
    beside = next((each for each in (total, count) if isinstance(each, Tensor)), loss)
    for each in (total, count):
        if not isinstance(each, Tensor | int | float) or (
            isinstance(each, Tensor) and each.numel() != 1
        ):
            raise TypeError(f"{WRONG_METRIC}: {name}")
    with torch.fx.traceback.annotate({METRIC: name}):
        return torch.stack([_wide(each, beside) for each in (total, count)])


def _wide(value: Tensor | float, beside: Tensor) -> Tensor:
    """A number without a gradient, in the dtype in which it is summed."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float64)
    return _zero(beside) + value


def _zero(beside: Tensor) -> Tensor:
    return torch.zeros_like(beside.detach(), dtype=torch.float64).reshape(())


def _kind(result: Any) -> str:
    return "None: it has no return" if result is None else type(result).__name__


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach() if not value.is_floating_point() else value
        return value.reshape(()) if value.numel() == 1 else value
    return value


@dataclass(frozen=True)
class Results:
    """The nodes that a captured step returns."""

    loss: fx.Node
    count: fx.Node | None
    metrics: Mapping[str, fx.Node]  # by their names, without characters that the graph's own use
    predictions: Mapping[str, fx.Node]

    @property
    def all(self) -> list[fx.Node]:
        counts = [self.count] if self.count is not None else []
        return [self.loss, *counts, *self.metrics.values(), *self.predictions.values()]


def results_of(graph: fx.Graph) -> Results:
    """What a captured graph returns."""
    found = next(iter(reversed(graph.nodes))).args[0]
    nodes = list(found) if isinstance(found, tuple | list) else [found]
    metrics = {name: node for node in nodes if (name := _name(node, METRIC))}
    predictions = {name: node for node in nodes if (name := _name(node, PREDICTION))}
    named = {*metrics.values(), *predictions.values()}
    plain = [node for node in nodes if node not in named]
    if len(plain) not in (1, 2) or not all(isinstance(node, fx.Node) for node in plain):
        raise TraceError(
            f"step returns {len(plain)} results",
            legal="a mean loss, or a pair (sum, count), and maybe a dict of metrics behind it",
        )
    for node in plain:
        if value_of(node).numel() != 1:
            raise TraceError(
                f"step returns a tensor of shape {tuple(value_of(node).shape)}{_at(node)}",
                legal="a mean loss, or a pair (sum, count), each with one element",
            )
    return Results(plain[0], plain[1] if len(plain) == 2 else None, metrics, predictions)


def _name(node: Any, kind: str) -> str:
    """What a node of the graph's results is called, if it is of a kind."""
    custom = node.meta.get("custom") if isinstance(node, fx.Node) else None
    return quote((custom or {}).get(kind, ""), safe="._-")


def refuse_constant_metrics(
    metrics: Mapping[str, fx.Node], alike: Callable[[fx.Node], bool]
) -> None:
    """Raise where a metric is the same whatever the batch and the parameters are: no chunk makes it."""
    for name, node in metrics.items():
        if alike(node):
            raise TraceError(
                f"metric {unquote(name)!r} depends on neither the batch nor parameters{_at(node)}",
                legal="tensors made of them, or numbers of Python",
            )


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""
