"""Counted steps: a step whose mean over targets becomes their (sum, count), eager and captured alike.

The mean of a cross entropy leaves out targets of `ignore_index`. Microbatches with different numbers of
the others have means that count differently; sums and counts can be added up however a batch is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from piper.bodies.captured_nodes import callee, source_of, value_of
from piper.errors import TraceError
from piper.frontend.capture.step_results import loss_and_metrics, results_of

_LOSSES = (F.cross_entropy, F.nll_loss)
_SAME = ("clone", "contiguous", "double", "float", "reshape", "squeeze", "to", "view")
_LEGAL = 'a step that returns (sum, count) itself, without mean="batch"'


@dataclass(frozen=True)
class CountedStep:
    """The user's step, which returns a mean over targets; this one returns their (sum, count)."""

    step: Callable[[nn.Module, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with _Counting() as counting:
            total, metrics = loss_and_metrics(self.step(model, batch))
        counted = total, counting.count
        return (counted, metrics) if metrics else counted


def uncounted(step: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """What Dynamo is given of a step: `count_targets` changes its graph afterwards."""
    return step.step if isinstance(step, CountedStep) else step


def mean_call(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    """The call of a loss that takes the mean over targets, with all its arguments; None of others."""
    if function not in _LOSSES:
        return None
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    return None if legacy or given["reduction"] != "mean" else call


class _Counting(TorchFunctionMode):
    count: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        call = mean_call(func, args, kwargs or {}) if func in _LOSSES else None
        if call is None:
            return func(*args, **(kwargs or {}))
        given = call.arguments
        self.count = (given["target"] != given["ignore_index"]).sum()
        given["reduction"] = "sum"
        return func(*call.args, **call.kwargs)


def count_targets(graph: fx.Graph) -> None:
    """A captured step that returns a mean over targets returns their (sum, count)."""
    output = next(iter(reversed(graph.nodes)))
    results = results_of(graph)
    loss = results.loss
    if results.count is not None:
        raise TraceError('mean="batch", but step returns (sum, count)', legal=_LEGAL)
    node, call = _mean_of(graph, loss)
    given = call.arguments
    target, ignored = given["target"], given["ignore_index"]
    given["reduction"] = "sum"
    node.args, node.kwargs = call.args, call.kwargs
    with graph.inserting_before(node.next):
        kept = graph.call_function(torch.ne, (target, ignored))
        kept.meta = {**node.meta, "example_value": value_of(target) != ignored}
        count = graph.call_method("sum", (kept,), {"dtype": torch.float64})
        count.meta = {**node.meta, "example_value": value_of(kept).sum(dtype=torch.float64)}
    output.args = ((loss, count, *results.metrics.values()),)


def _mean_of(graph: fx.Graph, loss: fx.Node) -> tuple[fx.Node, inspect.BoundArguments]:
    """The node that is the loss, if that is a mean over targets and nothing else."""
    node = loss
    while node.op == "call_method" and callee(node) in _SAME:
        node = node.all_input_nodes[0]
    means = [n for n in graph.nodes if n.op == "call_function" and n.target in _LOSSES]
    call = mean_call(node.target, node.args, node.kwargs)
    if call is None or means != [node]:
        raise TraceError(
            f'mean="batch", but the loss is not one mean of F.cross_entropy{_at(node)}',
            legal=_LEGAL,
        )
    target = value_of(call.arguments["target"])
    if call.arguments["weight"] is not None or not isinstance(target, Tensor):
        raise TraceError(f'mean="batch", but the loss weighs its targets{_at(node)}', legal=_LEGAL)
    if target.is_floating_point():
        raise TraceError(f'mean="batch", but targets are probabilities{_at(node)}', legal=_LEGAL)
    return node, call


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""
