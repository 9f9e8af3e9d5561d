"""FX code as JSON text, so that bodies have a content hash and travel without pickle."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from piper.bodies import (
    expert_ops as expert_ops,  # bodies may call these operators: register them first
)
from piper.bodies.body_memory import refuse_shared_memory
from piper.bodies.chunk_code import constant_data
from piper.bodies.quick import quicken
from piper.bodies.random import uniform as uniform
from piper.errors import PlanError, TraceError

_MARK = "$"  # key of the one-entry objects that stand for what JSON lacks
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
}
_MODULES: dict[str, Any] = {
    "_operator": operator,
    "math": math,
    "torch": torch,
    "torch.random": torch.random,
}
_MAX_CONSTANT = 1 << 20


def encode(graph: fx.Graph, constants: dict[str, torch.Tensor] | None = None) -> str:
    """The text of a graph of placeholders, operator calls, small constants and one output."""
    constants = constants or {}
    number: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(["in"])
        elif node.op == "get_attr":
            lines.append(["constant", _encode_constant(constants[str(node.target)], node)])
        elif node.op == "output":
            lines.append(["out", _encode(node.args[0], number)])
        else:
            kwargs = {key: _encode(value, number) for key, value in node.kwargs.items()}
            args = [_encode(arg, number) for arg in node.args]
            lines.append(
                [_target_name(node), args, kwargs] if kwargs else [_target_name(node), args]
            )
        number[node] = len(number)
    return json.dumps(lines, separators=(",", ":"))


def content_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decode(text: str) -> fx.GraphModule:
    """The module that `encode` was given."""
    graph = fx.Graph()
    root = torch.nn.Module()
    nodes: list[fx.Node] = []
    for line in json.loads(text):
        match line:
            case ["in"]:
                nodes.append(graph.placeholder(f"a{len(nodes)}"))
            case ["constant", data]:
                name = f"c{len(nodes)}"
                root.register_buffer(name, _decode_constant(data))
                nodes.append(graph.get_attr(name))
            case ["out", value]:
                graph.output(_decode(value, nodes))
            case [target, args, *rest]:
                kwargs = {k: _decode(v, nodes) for k, v in (rest[0] if rest else {}).items()}
                found = resolve_target(target)
                nodes.append(graph.call_function(found, tuple(_decode(args, nodes)), kwargs))
    return fx.GraphModule(root, graph)


@lru_cache(maxsize=1024)
def load(text: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of a body; a pure one, which tasks and workers of a process share."""
    module = decode(text)
    refuse_shared_memory(module.graph)
    quicken(module.graph)
    module.recompile()
    return module.forward


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", "")
    if module in _MODULES and callable(target):
        return f"{module}:{target.__name__}"
    raise TraceError(f"the operator {target} cannot be shipped to workers")


def resolve_target(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if function:
        return getattr(_MODULES[module], function)
    namespace, operation, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    except AttributeError:
        raise PlanError(
            f"this process has no operator {name}",
            legal="import the module that registers it before the plan is loaded",
        ) from None


def _encode(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {_MARK: ["node", number[value]]}
    if isinstance(value, float) and not math.isfinite(value):
        return {_MARK: ["float", repr(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {_MARK: ["complex", [value.real, value.imag]]}
    if isinstance(value, tuple):
        return {_MARK: ["tuple", [_encode(item, number) for item in value]]}
    if isinstance(value, list):
        return [_encode(item, number) for item in value]
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        return {_MARK: ["slice", [_encode(part, number) for part in parts]]}
    if isinstance(value, torch.dtype):
        return {_MARK: ["dtype", str(value).removeprefix("torch.")]}
    if isinstance(value, torch.device):
        return {_MARK: ["device", value.type]}
    if isinstance(value, torch.layout):
        return {_MARK: ["layout", str(value).removeprefix("torch.")]}
    if isinstance(value, torch.memory_format):
        return {_MARK: ["format", str(value).removeprefix("torch.")]}
    raise TraceError(f"an argument of type {type(value).__name__} cannot be shipped to workers")


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    kind, data = value[_MARK]
    match kind:
        case "node":
            return nodes[data]
        case "float":
            return float(data)
        case "complex":
            return complex(*data)
        case "tuple":
            return tuple(_decode(item, nodes) for item in data)
        case "slice":
            return slice(*(_decode(part, nodes) for part in data))
        case "dtype" | "layout":
            return getattr(torch, data)
        case "device":
            return torch.device(data)
        case "format":
            return _FORMATS[data]
    raise PlanError(f"unknown mark {kind!r} in a body")


def _encode_constant(tensor: torch.Tensor, node: fx.Node) -> list[Any]:
    if tensor.numel() * tensor.element_size() > _MAX_CONSTANT:
        raise TraceError(
            f"a tensor constant of {tensor.numel()} elements is part of the code",
            details=[(node.stack_trace or str(node.target)).strip().splitlines()[-1].strip()],
            legal="register it as a buffer of the module",
        )
    dtype, shape, data = constant_data(tensor)
    return [dtype, shape, base64.b64encode(data).decode()]


def _decode_constant(data: list[Any]) -> torch.Tensor:
    dtype, shape, text = data
    if not text:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)
