"""Products that a body adds to sums where they arise: which results are such, and the code that adds.

The product takes no memory, and the sum is read and written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piper.errors import PlanError

_aten = torch.ops.aten
_SAME = (_aten.t.default, _aten.detach.default)  # a product, perhaps turned


def products_of(graph: fx.Graph) -> tuple[int, ...]:
    """The places of results that are products of two matrices, for nobody else."""
    [end] = graph.find_nodes(op="output")
    results = end.args[0]
    assert isinstance(results, Sequence)
    return tuple(i for i, result in enumerate(results) if _product(result, results) is not None)


def _product(result: Any, results: Sequence[Any]) -> fx.Node | None:
    if not isinstance(result, fx.Node) or results.count(result) != 1:
        return None
    node, turns = result, 0
    while node.target in _SAME and len(node.users) == 1:
        turns += node.target is _aten.t.default
        node = node.args[0]  # type: ignore[assignment]
    alone = len(node.users) == 1 and not node.kwargs and turns % 2 == 0
    return node if alone and node.target is _aten.mm.default else None


Added = tuple[tuple[int, bool], ...]  # places of results, and whether each starts its sum


def add_products(graph: fx.Graph, added: Added, call: Callable[..., None]) -> None:
    """Change a body: it takes a sum for each of these results behind its other arguments, adds the
    result there, and gives None in its place."""
    [end] = graph.find_nodes(op="output")
    results: list[Any] = list(end.args[0])
    *_, last = graph.find_nodes(op="placeholder")
    found = [(place, starts, _product(results[place], results)) for place, starts in added]
    for place, starts, product in found:
        if product is None:
            raise PlanError(f"result {place} of a body is no product that could be added to a sum")
        with graph.inserting_after(last):
            last = graph.placeholder(f"sum{place}")
        with graph.inserting_after(product):
            graph.call_function(call, (last, *product.args, starts))
        results[place] = None
    unread = [end.args[0][place] for place, _ in added]
    end.args = (tuple(results),)
    for node in unread:
        _erase(graph, node, {product for *_, product in found})


def _erase(graph: fx.Graph, node: Any, products: Iterable[Any]) -> None:
    """What only showed a product, and the product."""
    while True:
        before = node.args[0]
        graph.erase_node(node)
        if node in products:
            return
        node = before


def add_into(total: Tensor, left: Tensor, right: Tensor, starts: bool) -> None:
    """Add a product to a sum, or start the sum with it, by the kernel of the product. It is not rounded
    to its own dtype where the sum has a wider one."""
    if total.dtype != left.dtype:
        if starts:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif starts:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


@torch.library.custom_op("piper::add_product", mutates_args=("total",))
def add_product(total: Tensor, left: Tensor, right: Tensor, starts: bool) -> None:
    """`add_into`, for compilers."""
    add_into(total, left, right, starts)


@add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor, starts: bool) -> None:
    return None
