"""FX code as JSON text, so that bodies have a content hash and travel without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from piper.bodies import expert_ops as expert_ops  # bodies may call these: register them first
from piper.bodies import row_ops as row_ops
from piper.bodies.chunk_code import spec_of
from piper.bodies.cutting.body_memory import refuse_shared_memory
from piper.bodies.files.allowed_operators import operator_name, operator_of
from piper.bodies.files.body_values import (
    decode_constant,
    decode_value,
    encode_constant,
    encode_value,
    refuse,
    shortened,
)
from piper.bodies.files.operator_calls import check_call
from piper.bodies.files.quick import quicken
from piper.bodies.products import Added, add_into, add_products
from piper.bodies.random import uniform as uniform
from piper.bodies.tensor import part_ops as part_ops
from piper.errors import TraceError
from piper.files import excess
from piper.ir.tensor_type import TensorType
from piper.plan.body_spec import content_hash as content_hash

INPUT = "piper_input"  # in the meta of an input: its type, as text
Function = Callable[[list[Any]], Sequence[torch.Tensor]]  # of a list of arguments, which it empties


def encode(graph: fx.Graph, constants: dict[str, torch.Tensor] | None = None) -> str:
    """The text of a graph of placeholders, operator calls, small constants and one output."""
    constants = constants or {}
    number: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(["in", *_input_type(node)])
        elif node.op == "get_attr":
            lines.append(["constant", encode_constant(constants[str(node.target)], node)])
        elif node.op == "output":
            lines.append(["out", encode_value(node.args[0], number)])
        else:
            kwargs = {key: encode_value(value, number) for key, value in node.kwargs.items()}
            args = [encode_value(arg, number) for arg in node.args]
            name = operator_name(node.target)
            if name is None:
                raise TraceError(f"the operator {node.target} cannot be shipped to workers")
            lines.append([name, args, kwargs] if kwargs else [name, args])
        number[node] = len(number)
    return json.dumps(lines, separators=(",", ":"))


def _input_type(node: fx.Node) -> list[str]:
    """The type of an input, if it is a tensor: equal code may be called with other shapes elsewhere, and
    a body is called with tensors of one type."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [input_type(spec_of(value))]
    return [node.meta[INPUT]] if INPUT in node.meta else []


def input_type(type: TensorType) -> str:
    """`float32[4,8]`, or `float32[*,8]` if the number of rows depends on the data."""
    sizes = [str(size) for size in type.shape]
    if type.bound is not None:
        sizes[0] = "*"
    return f"{type.dtype}[{','.join(sizes)}]"


def decode(text: str, added: Added = ()) -> fx.GraphModule:
    """The module that `encode` was given. Its text is data: nothing of it is evaluated.

    Names in the code that torch makes of the graph are ours, or an operator's and its arguments'.
    Results that are `added` are as in `load`.
    """
    root, graph = _decoded(text)
    if added:
        add_products(graph, added, torch.ops.piper.add_product.default)
    return fx.GraphModule(root, graph)


def _decoded(text: str) -> tuple[torch.nn.Module, fx.Graph]:
    """The constants and the graph."""
    graph = fx.Graph()
    root = torch.nn.Module()
    nodes: list[fx.Node] = []
    *lines, last = _lines(text)
    for line in lines:
        match line:
            case ["in"]:
                nodes.append(graph.placeholder(f"a{len(nodes)}"))
            case ["in", str(type)]:
                nodes.append(graph.placeholder(f"a{len(nodes)}"))
                nodes[-1].meta[INPUT] = type
            case ["constant", data]:
                name = f"c{len(nodes)}"
                root.register_buffer(name, decode_constant(data))
                nodes.append(graph.get_attr(name))
            case [str(operator), [*args]] if operator != "out":
                nodes.append(_call(graph, operator, args, {}, nodes))
            case [str(operator), [*args], dict(kwargs)]:
                nodes.append(_call(graph, operator, args, kwargs, nodes))
            case _:
                refuse(f"a line is {shortened(line)}")
    match last:
        case ["out", value]:
            graph.output(_results(decode_value(value, nodes)))
        case _:
            refuse(f"the last line is {shortened(last)}")
    return root, graph


def _lines(text: str) -> list[Any]:
    problem = excess(text.encode(errors="replace"))
    if problem:
        refuse(problem)
    try:
        lines = json.loads(text)
    except ValueError as error:
        refuse(f"{error}")
    if not isinstance(lines, list) or not lines:
        refuse(f"it is {shortened(lines)}")
    return lines


def _call(
    graph: fx.Graph,
    name: str,
    args: list[Any],
    kwargs: dict[str, Any],
    nodes: list[fx.Node],
) -> fx.Node:
    target = operator_of(name)
    values = tuple(decode_value(arg, nodes) for arg in args)
    named = {key: decode_value(value, nodes) for key, value in kwargs.items()}
    check_call(name, target, values, named)
    return graph.call_function(target, values, named)


def _results(value: Any) -> Any:
    """A body gives a row of tensors; a place without one is None."""
    if not isinstance(value, tuple | list):
        refuse(f"its results are {shortened(value)}")
    for item in value:
        if item is not None and not isinstance(item, fx.Node):
            refuse(f"a result is {shortened(item)}")
    return value


class _FromList(fx.graph.CodeGen):
    """Code that forgets each argument, as any other value, after the line that reads it last."""

    def gen_fn_def(self, free_vars: list[str], *_: Any, **__: Any) -> str:
        names = "".join(f"{name.partition(':')[0]}, " for name in free_vars if name != "self")
        taken = f"\n    {names}= given" if names else ""
        return f"def {self._func_name}(self, given):{taken}\n    given.clear()"


@lru_cache(maxsize=1024)
def load(text: str, added: Added = ()) -> Function:
    """The function of a body; a pure one, which tasks and workers of a process share.

    It takes its arguments out of a list, so that one that nobody else holds is freed at its last use.
    Behind them it takes a sum for each result that is `added`, which it adds there and does not give.
    """
    root, graph = _decoded(text)
    refuse_shared_memory(graph)
    if added:
        add_products(graph, added, add_into)
    quicken(graph)
    graph.set_codegen(_FromList())
    return fx.GraphModule(root, graph).forward
