"""Loss growth: one program captured at two batch sizes in; where its loss becomes a sum over rows out.

Every node gets a power: its values grow like (number of rows) ** power, if all rows are alike. A sum
over rows adds 1 and a mean 0; a division by a number of rows takes 1 off, be it a sum itself or a
constant that differs between the two captures. Where nothing certain can be said the power is unknown,
and so is all that depends on it: a mean loss is never called a sum.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from piper.bodies.captured_nodes import callee, source_of, value_of
from piper.bodies.leaves import tensors_in
from piper.errors import Source
from piper.frontend.capture.capture import Capture, alike

_SUMS = {"sum", "nansum"}
_MEANS = {"mean", "nanmean"}
_PRODUCTS = {"mul", "imul", "multiply", "mul_"}
_QUOTIENTS = {"truediv", "itruediv", "div", "divide", "true_divide", "div_"}
_TOTALS = {"add", "iadd", "sub", "isub", "add_", "sub_"}
_SAME = {
    "bfloat16", "clone", "contiguous", "detach", "double", "expand", "flatten", "float", "getitem",
    "half", "neg", "requires_grad_", "reshape", "squeeze", "to", "type", "unsqueeze", "view",
}  # fmt: skip
_ARITHMETIC = _PRODUCTS | _QUOTIENTS | _TOTALS | {"setitem", "copy_", "fill_"}
_ALONG_A_DIM = {"cumsum", "gumbel_softmax", "log_softmax", "normalize", "softmax", "softmin"}
_CONSTANTS = {"as_tensor", "full", "full_like", "new_full", "new_tensor", "scalar_tensor", "tensor"}


@dataclass(frozen=True)
class _Power:
    """`power` is None where it is not known; `of` is the node that makes it positive."""

    power: float | None
    of: fx.Node | None = None


_NONE, _UNKNOWN = _Power(0.0), _Power(None)


def growing_sum(small: Capture, large: Capture) -> Source | None:
    """Where the loss becomes a sum over rows; None if it is no sum, or nobody knows."""
    if small.count is not None or not alike(small, large):
        return None
    loss = _Powers(small, large).of_node[small.loss]
    grows = loss.power is not None and loss.power > 0
    return source_of(loss.of) if grows and loss.of is not None else None


class _Powers:
    def __init__(self, small: Capture, large: Capture) -> None:
        self.twin = dict(zip(small.graph.nodes, large.graph.nodes, strict=True))
        batch = next(n for n, origin in small.origins.items() if origin.role == "batch")
        rows = [value_of(node).shape[0] for node in (batch, self.twin[batch])]
        self.ratio = rows[1] / rows[0]
        facts = small.facts
        self.overwritten = {
            memory
            for node in small.graph.nodes
            if callee(node) in _ARITHMETIC
            for memory in facts.changes.get(node, ())
        }
        self.of_node: dict[fx.Node, _Power] = {}
        for node in small.graph.nodes:
            changed = self.overwritten & facts.memory.get(node, frozenset())
            self.of_node[node] = _UNKNOWN if changed else self._power(node)

    def _power(self, node: fx.Node) -> _Power:
        if not node.op.startswith("call"):
            return _NONE
        name = callee(node)
        if name in _PRODUCTS | _QUOTIENTS | _TOTALS:
            return self._arithmetic(node, name)
        if node.all_input_nodes and name in _SAME | _MEANS | _SUMS:
            before = self.of_node[node.all_input_nodes[0]]
            if name in _SUMS and before.power is not None and self._loses_rows(node):
                return _Power(before.power + 1, node)
            return before
        reduction = _reduction(node)
        if reduction and self._zero(node.all_input_nodes):
            return _Power(1.0, node) if reduction == "sum" and self._loses_rows(node) else _NONE
        return self._other(node, name)

    def _other(self, node: fx.Node, name: str) -> _Power:
        """Any function of what does not grow, unless it mixes rows."""
        mine, theirs = _numbers(node), _numbers(self.twin[node])
        differ = [a for a, b in zip(mine, theirs, strict=False) if a != b]
        if len(mine) != len(theirs) or any(isinstance(number, float) for number in differ):
            return _UNKNOWN
        if (differ and name in _CONSTANTS) or self._loses_rows(node):
            return _UNKNOWN
        if name in _ALONG_A_DIM and self._along_rows(node):
            return _UNKNOWN
        inputs = node.all_input_nodes
        if self._grows(node):  # integers choose rows there
            inputs = [arg for arg in inputs if _is_floating(value_of(arg))]
        return _NONE if self._zero(inputs) else _UNKNOWN

    def _arithmetic(self, node: fx.Node, name: str) -> _Power:
        if len(node.args) != 2 or any(key not in ("alpha", "rounding_mode") for key in node.kwargs):
            return _UNKNOWN
        one, other = (
            self._operand(a, b) for a, b in zip(node.args, self.twin[node].args, strict=True)
        )
        if one.power is None or other.power is None:
            return _UNKNOWN
        if name in _TOTALS:
            if one.power != other.power and self._grows(node):
                return _UNKNOWN
            return max(one, other, key=lambda p: p.power or 0.0)
        sign = -1 if name in _QUOTIENTS else 1
        return _Power(one.power + sign * other.power, one.of or other.of or node)

    def _operand(self, arg: Any, twin: Any) -> _Power:
        if isinstance(arg, fx.Node):
            return self.of_node[arg]
        if arg == twin:
            return _NONE
        if not isinstance(arg, int | float) or arg * twin <= 0:
            return _UNKNOWN
        power = math.log(twin / arg) / math.log(self.ratio)
        return _Power(round(power)) if abs(power - round(power)) < 1e-6 else _UNKNOWN

    def _zero(self, nodes: Iterable[fx.Node]) -> bool:
        return all(self.of_node[node].power == 0 for node in nodes)

    def _grows(self, node: fx.Node) -> bool:
        """Whether a node's result has more elements where there are more rows."""
        mine, theirs = tensors_in(value_of(node)), tensors_in(value_of(self.twin[node]))
        return [t.shape for t in mine] != [t.shape for t in theirs]

    def _along_rows(self, node: fx.Node) -> bool:
        """Whether a function of one dim takes the one along which there are rows."""
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        mine, theirs = (value_of(n).shape for n in (node, self.twin[node]))
        return not isinstance(dim, int) or mine[dim] != theirs[dim]

    def _loses_rows(self, node: fx.Node) -> bool:
        return not self._grows(node) and any(map(self._grows, node.all_input_nodes))


def _reduction(node: fx.Node) -> str:
    """How a loss function of torch reduces what it computes per element; "" of anything else."""
    function = node.target
    home = getattr(function, "__module__", "")
    if isinstance(function, str) or home != "torch.nn.functional":
        return ""
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return ""
    given.apply_defaults()
    legacy = given.arguments.get("size_average"), given.arguments.get("reduce")
    reduction = given.arguments.get("reduction")
    if legacy != (None, None) or reduction not in ("sum", "mean", "batchmean"):
        return ""
    return str(reduction)


def _numbers(node: fx.Node) -> list[Any]:
    numbers: list[Any] = []

    def note(arg: Any) -> Any:
        if isinstance(arg, int | float):
            numbers.append(arg)
        return arg

    fx.node.map_aggregate((node.args, node.kwargs), note)
    return numbers


def _is_floating(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
