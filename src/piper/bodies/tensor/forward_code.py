"""The forward of a chunk: ChunkCode in, functional aten from before dispatch out.

At this level products, norms, attention and losses are whole operators, for which rules are short, and
their kernels are not chosen yet. Each node has its fake `val`, and `flows`: whether a gradient passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module

from piper.bodies.captured_nodes import source_of
from piper.bodies.casts import CASTS, CapturedRun, Casts
from piper.bodies.chunk_code import ChunkCode
from piper.bodies.closed_operator import ClosedOperator
from piper.bodies.cutting.joint import fake_inputs, on_device
from piper.bodies.operators import bound_arguments, draws_random
from piper.bodies.tensor.dropout_masks import with_masks
from piper.bodies.tensor.explicit_casts import add_casts
from piper.errors import TraceError

aten = torch.ops.aten
FLOWS = "piper_flows"  # in a node's meta: whether a gradient passes it
SEQUENCE = "piper_sequence"  # likewise: the dim of the sequence, where the code before hides it
_CAPTURED = (
    "piper_captured"  # in the part of meta that traces keep: the number of the captured node
)
_KNOWN: dict[Any, fx.GraphModule] = {}  # by code: equal layers are traced once
_MOST_KNOWN = 256
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def forward_code(code: ChunkCode) -> fx.GraphModule:
    """Placeholders are the inputs, in order. The graph is the caller's own."""
    key = code.key, code.targets
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _trace(code)
    known, graph = _KNOWN[key], fx.Graph()
    graph.output(graph.graph_copy(known.graph, {}))
    return fx.GraphModule(known, graph)


def _trace(code: ChunkCode) -> fx.GraphModule:
    _check_inputs(code)
    root, graph = on_device(replace(code, graph=with_masks(code.graph)), "cpu")
    captured = list(graph.nodes)
    for number, node in enumerate(captured):  # without marks of checkpoints
        node.meta["custom"] = {_CAPTURED: number}

    class Forward(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            with torch.device("cpu"):
                return CapturedRun(root, graph=graph).run(*inputs)

    inputs, mode = fake_inputs(code, "cpu")
    with warnings.catch_warnings(), torch.fx.traceback.preserve_node_meta():
        warnings.simplefilter("ignore")
        module, signature = aot_export_module(
            Forward(), inputs, trace_joint=False, pre_dispatch=True
        )
    assert isinstance(module, fx.GraphModule)
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise TraceError(
            "an input of the chunk is changed in place",
            legal="write the result to a new tensor: x = x + y instead of x += y",
        )
    _drop_unneeded(module.graph)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta.setdefault("val", getattr(module, str(node.target)))
    with mode:
        add_casts(module.graph, _casts_of(module.graph, captured))
    _keep_sequences(module.graph, captured)
    _check_no_generator(module.graph)
    _note_flows(module, code)
    return module


def _check_inputs(code: ChunkCode) -> None:
    for node in code.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, ClosedOperator) and name == "autograd_function_apply":
            # Only its forward would be seen here, and the gradients before it would be lost.
            raise TraceError(
                f"an autograd.Function ({source_of(node)}) cannot be cut over ranks",
                legal="operators of torch, or torch.library.custom_op with register_autograd",
            )
    if code.fold is not None or any(given.carried for given in code.inputs):
        raise TraceError(
            "the chunk changes buffers (running statistics), which have no parts over ranks",
            legal="code without state: LayerNorm or RMSNorm instead of BatchNorm",
        )
    if any(spec.bound is not None for spec in (*(i.spec for i in code.inputs), *code.outputs)):
        raise TraceError(
            "the chunk's number of rows depends on the data, and cannot be cut over ranks",
            legal="experts over an axis of their own (shard), the code around them over this",
        )


def _drop_unneeded(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is aten.dropout.default and not _drops(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _VIEWS and _has_shape(node.args[0], node):
            # Bodies with such a view and with a real one would be one, called with other shapes.
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.copy.default:  # functional, but without a derivative
            _replace_copy(graph, node)
    graph.eliminate_dead_code()


def _has_shape(source: fx.Node, node: fx.Node) -> bool:
    return bool(source.meta["val"].shape == node.meta["val"].shape)


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """A copy is its source, in its own dtype and shape."""
    source, made = node.args[1], node.meta["val"]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(node):
        if source.meta["val"].dtype != made.dtype:
            value = source.meta["val"].to(made.dtype)
            source = graph.call_function(aten._to_copy.default, (source,), {"dtype": made.dtype})
            source.meta = {**node.meta, "val": value}
        if source.meta["val"].shape != made.shape:
            source = graph.call_function(aten.expand.default, (source, list(made.shape)))
            source.meta = dict(node.meta)
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _drops(node: fx.Node) -> bool:
    given = bound_arguments(node.target, node.args, node.kwargs)
    return bool(given["train"] and given["p"])


def _casts_of(graph: fx.Graph, captured: list[fx.Node]) -> dict[fx.Node, Casts]:
    found = {}
    for node in graph.nodes:
        number = (node.meta.get("custom") or {}).get(_CAPTURED)
        casts = captured[number].meta.get(CASTS) if number is not None else None
        if casts is not None:
            found[node] = casts
    return found


def _keep_sequences(graph: fx.Graph, captured: list[fx.Node]) -> None:
    """The last of the nodes that a captured one has become has its result."""
    last = {(node.meta.get("custom") or {}).get(_CAPTURED): node for node in graph.nodes}
    for number, node in last.items():
        if number is not None and SEQUENCE in captured[number].meta:
            node.meta[SEQUENCE] = captured[number].meta[SEQUENCE]


def _check_no_generator(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and draws_random(node.target, node.args, node.kwargs):
            raise TraceError(
                f"{node.target} draws random numbers ({source_of(node)}), of which a rank cannot draw "
                "its part",
                legal="torch.nn.functional.dropout in code that is cut over ranks",
            )


def _note_flows(module: fx.GraphModule, code: ChunkCode) -> None:
    """A gradient passes a node that autograd follows, and from which a tangent comes back."""
    inputs, mode = fake_inputs(code, "cpu")
    with mode, torch.enable_grad():
        run = fx.Interpreter(module, garbage_collect_values=False)
        run.run(*inputs)
    results = next(iter(reversed(module.graph.nodes)))
    tangents: Collection[Any] = {results.args[0][index] for index in code.tangents}
    for node in reversed(module.graph.nodes):
        if node.op == "output":
            continue
        wanted = node in tangents or any(user.meta.get(FLOWS) for user in node.users)
        node.meta[FLOWS] = wanted and _requires_grad(run.env.get(node))


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(map(_requires_grad, value))
