"""any_rows: a step recorded with a symbolic number of rows in; its graph at one number out.

Dynamo notes as guards what it has assumed of the number. At a number that keeps them all, the recorded
calls are those of a recording at that number. Sizes, and what is computed from them, are then numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch._refs
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.value_ranges import ValueRanges

from piper.bodies.leaves import tensors_in

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (bool, int, float)
# What Dynamo records for a function when an argument is symbolic -> that function.
_WITH_NUMBERS: dict[Any, Any] = {torch._refs.tensor: torch.tensor}


def leave_rows_open(leaves: Iterable[Tensor]) -> None:
    """Ask Dynamo to keep dim 0 symbolic, where it can."""
    for leaf in leaves:
        torch._dynamo.maybe_mark_dynamic(leaf, 0)


def depends_on_data(value: Any) -> bool:
    """Whether a node's result is a number, or has a shape, that depends on what is in the batch."""
    symbols: list[Any] = [value] if isinstance(value, _SYMBOLIC) else []
    symbols += [n for t in tensors_in(value) for n in t.shape if isinstance(n, torch.SymInt)]
    return any(free_unbacked_symbols(symbol) for symbol in symbols)


class RowSymbol:
    """The number of rows of a recorded batch, and what was assumed of it."""

    def __init__(self, leaves: Sequence[Tensor], *, recorded_at: int) -> None:
        self.recorded_at = recorded_at
        self._sizes: list[Any] = [leaf.shape[0] for leaf in leaves]

    def shape(self, tensor: Tensor, rows: int) -> tuple[int, ...]:
        """The shape that a recorded tensor has at another number of rows, which is covered."""
        return tuple(_at(size, rows) for size in tensor.shape)

    def covers(self, rows: int) -> bool:
        """Whether the recording is that of a batch with so many rows."""
        if rows == self.recorded_at:
            return True
        if rows < 2 or not self._sizes:  # torch takes a size of 0 or 1 for a constant
            return False
        if not all(isinstance(size, torch.SymInt) for size in self._sizes):
            return False
        env: ShapeEnv = self._sizes[0].node.shape_env
        symbols = {env.replace(size.node.expr) for size in self._sizes}
        if not all(isinstance(symbol, sympy.Symbol) for symbol in symbols):
            return False
        if not all(_within(rows, env.var_to_range[symbol]) for symbol in symbols):
            return False
        number = dict.fromkeys(symbols, sympy.Integer(rows))
        assumed = (env.replace(guard.expr).xreplace(number) for guard in env.guards)
        return all(condition == sympy.true for condition in assumed)


def _at(size: Any, rows: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.shape_env.replace(size.node.expr)
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(rows))))


def _within(rows: int, range_: ValueRanges[sympy.Expr]) -> bool:
    return bool(range_.lower <= rows) and bool(rows <= range_.upper)


def without_row_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Tensor]:
    """The inputs that are tensors. Torch 2.11 gives the number of rows as one more input; the graph is
    made to read it off a tensor instead."""
    placeholders = graph.find_nodes(op="placeholder")
    rows = {node: _symbol(node) for node in placeholders if _symbol(node) is not None}
    leaves = {
        str(shape[0]): node
        for node in reversed(placeholders)
        if node not in rows and (shape := getattr(node.meta.get("example_value"), "shape", ()))
    }
    for node, symbol in rows.items():
        if symbol not in leaves:
            continue
        with graph.inserting_before(placeholders[-1].next):
            size = graph.call_method("size", (leaves[symbol], 0))
        size.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(size)
        graph.erase_node(node)
    kept = set(graph.find_nodes(op="placeholder"))
    return [value for node, value in zip(placeholders, inputs, strict=True) if node in kept]


def _symbol(node: fx.Node) -> str | None:
    """The symbol that an input stands for, if it is a number."""
    value = node.meta.get("example_value")
    return str(value) if isinstance(value, torch.SymInt) else None


def at_rows(
    graph: fx.Graph, results: Mapping[fx.Node, Any]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph for inputs of one size, in which numbers stand for what computes them, and what became
    of each node. Its nodes hold the `results` of a run on such inputs."""
    copies: dict[fx.Node, Any] = {}
    fixed = fx.Graph()
    for node in graph.nodes:
        value = results[node]
        if node.op.startswith("call") and _is_number(value):
            copies[node] = tuple(value) if isinstance(value, torch.Size) else value
        elif node.op.startswith("call") and not _has_tensors(node, results):
            copies[node] = None  # a check of numbers, which hold here
        else:
            args, kwargs = (fx.map_arg(a, copies.__getitem__) for a in (node.args, node.kwargs))
            target = _WITH_NUMBERS.get(node.target, node.target)
            copies[node] = fixed.create_node(node.op, target, args, kwargs, node.name)
            copies[node].meta = dict(node.meta)
            if node.op != "output":
                copies[node].meta["example_value"] = value
    return fixed, {old: new for old, new in copies.items() if isinstance(new, fx.Node)}


def detached(result: Any) -> Any:
    """A node's result without its history."""
    return pytree.tree_map_only(Tensor, Tensor.detach, result)


def _has_tensors(node: fx.Node, results: Mapping[fx.Node, Any]) -> bool:
    """Whether a node reads or makes a tensor."""
    return any(tensors_in(results[n]) for n in (node, *node.all_input_nodes))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, _NUMBERS)
