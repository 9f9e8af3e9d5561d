"""Statistics: a captured graph in, in which norms do not change running values inside of an operator.

Batch and instance norms make their result and change their running values in one call. Afterwards the
call has running values of its own, which become the batch's statistics, and plain operators fold those
into the buffers: what a result needs and what a buffer needs are apart.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper.bodies.captured_nodes import OF_DTYPE, OF_STATE, source_of, value_of

# The functions, each with the argument that says whether it changes its running values.
NORMS: dict[Any, str] = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def separate_statistics(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in NORMS:
            continue
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        given = call.arguments
        running = [given["running_mean"], given["running_var"]]
        if all(isinstance(buffer, fx.Node) for buffer in running):
            for name in ("weight", "bias"):
                given[name] = _in_dtype(graph, node, given[name], value_of(running[0]).dtype)
            node.args, node.kwargs = call.args, call.kwargs
        if given[NORMS[node.target]] and all(isinstance(buffer, fx.Node) for buffer in running):
            momentum = given["momentum"]
            own = [_zeros(graph, node, buffer) for buffer in running]
            given.update(running_mean=own[0], running_var=own[1], momentum=1.0)
            node.args, node.kwargs = call.args, call.kwargs
            with graph.inserting_before(node.next):
                for buffer, seen in zip(running, own, strict=True):
                    _call(graph, node, "mul_", (buffer, 1 - momentum), buffer)
                    _call(graph, node, "add_", (buffer, seen), buffer, alpha=momentum)


def synced_norm(graph: fx.Graph) -> str:
    """The user's line of a SyncBatchNorm, which in a trace is like any other batch norm."""
    for node in graph.nodes:
        modules = (node.meta.get("nn_module_stack") or {}).values()
        if node.target is F.batch_norm and any(_is_synced(kind) for _, kind in modules):
            return str(source_of(node))
    return ""


def _is_synced(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.SyncBatchNorm)


def _in_dtype(graph: fx.Graph, norm: fx.Node, param: Any, dtype: torch.dtype) -> Any:
    """A parameter in the dtype of running values, which with precision="bf16" is a wider one: torch's
    norms take those two in one dtype, whatever their input is."""
    if not isinstance(param, fx.Node) or value_of(param).dtype == dtype:
        return param
    with graph.inserting_before(norm):
        made = graph.call_method("to", (param, dtype))
    made.meta = {**norm.meta, "example_value": value_of(param).to(dtype), OF_DTYPE: True}
    return made


def _zeros(graph: fx.Graph, norm: fx.Node, like: fx.Node) -> fx.Node:
    value: Tensor = value_of(like)
    with graph.inserting_before(norm):
        made = graph.call_function(torch.zeros, (tuple(value.shape),), {"dtype": value.dtype})
    made.meta = {**norm.meta, "example_value": value, OF_STATE: True}
    return made


def _call(
    graph: fx.Graph, norm: fx.Node, name: str, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> None:
    made = graph.call_method(name, args, kwargs)
    made.meta = {**norm.meta, "example_value": value_of(like)}
