"""A body's graph in; the memory that each node lies in, and how memory passes as it runs, out."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piper.errors import PlanError
from piper.plan.body_moments import Moment, Moments

# These share memory with their argument although their schemas do not say so.
UNSAFE_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)

Roots = Mapping[fx.Node, frozenset[fx.Node]]


def roots_of(graph: fx.Graph) -> Roots:
    """The nodes that made the memory of each node; for a new tensor, itself.

    Schemas say what shares memory. Where the graph was traced, the tensors that the trace saw say it
    too, so that an operator with a wrong schema is found.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        shared = frozenset().union(*(roots[other] for other in _sharing(node)))
        if node.target is operator.getitem:
            shared -= {n for n in node.all_input_nodes if _gives_several(n)}
        roots[node] = shared or frozenset({node})
    return roots


def refuse_shared_memory(graph: fx.Graph) -> None:
    """Every result of a body must lie alone in its memory: its arguments are freed at other times."""
    roots = roots_of(graph)
    owner = {node: f"argument {i}" for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    owner |= dict.fromkeys(graph.find_nodes(op="get_attr"), "own constant")
    [end] = graph.find_nodes(op="output")
    for index, result in enumerate(_results(end)):
        if not isinstance(result, fx.Node):
            continue
        for root in roots[result]:
            if root in owner:
                raise PlanError(
                    f"result {index} of a body lies in the memory of its {owner[root]}",
                    details=[f"{result.name} = {result.target}, which shares {root.name}"],
                    legal="a copy: the other one may be freed or overwritten first",
                )
            owner[root] = f"result {index}"


def _results(end: fx.Node) -> Sequence[Any]:
    results = end.args[0]
    return results if isinstance(results, Sequence) else [results]


def _sharing(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a call's result shares memory with."""
    if node.target is operator.getitem:
        yield from node.all_input_nodes
        return
    yield from _aliased(node)
    mine = _storage(node)
    if mine is not None:
        yield from (other for other in node.all_input_nodes if _storage(other) == mine)


def _gives_several(node: fx.Node) -> bool:
    """Whether an operator gives a row of tensors, which lie in memory of their own unless it says so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return len(returns) > 1 or isinstance(returns[0].type, torch._C.ListType)


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None or (position == 0 and node.target in UNSAFE_VIEWS):
            value = node.args[position] if position < len(node.args) else None
            yield from _nodes(node.kwargs.get(argument.name, value))


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage()._cdata


def moments_inside(graph: fx.Graph, *, growth: float = 1.0) -> Moments:
    """How the memory of a traced body passes: when it makes its results, when it reads its arguments for
    the last time, and the most bytes of its own tensors in between.

    These live from the node that makes them to the last one that reads them, as in the code that torch
    makes of the graph; a row of tensors lives as long as the row. Sizes that depend on data are
    `growth` times those of the trace.
    """
    roots, order = roots_of(graph), {node: at for at, node in enumerate(graph.nodes)}
    [end] = graph.find_nodes(op="output")
    outside = {root for node in end.all_input_nodes for root in roots[node]}
    outside |= {node for node in graph.nodes if node.op != "call_function"}
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        read = {root for other in node.all_input_nodes for root in roots[other]}
        for root in read | set(node.all_input_nodes) | {node}:
            last[root] = order[node]
    change = [0] * (len(order) + 1)
    made: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for root, tensor in _made(node, roots):
            made[root] = order[node]
            if root not in outside:
                size = _nbytes(tensor, growth)
                change[order[node]] += size
                change[max(last[root], last[node]) + 1] -= size
    makes: dict[int, list[int]] = defaultdict(list)  # node -> results that it makes
    for place, result in enumerate(_results(end)):
        for root in roots[result] & made.keys() if isinstance(result, fx.Node) else ():
            makes[made[root]].append(place)
    drops: dict[int, list[int]] = defaultdict(list)  # node -> arguments that it is the last to read
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        if order[node] < last[node] < order[end]:
            drops[last[node]].append(place)
    return tuple(_moments(list(itertools.accumulate(change)), makes, drops))


def _moments(
    own: Sequence[int], makes: Mapping[int, list[int]], drops: Mapping[int, list[int]]
) -> Iterator[Moment]:
    """Of bytes after each node; one ends where an argument is dropped or a result is made."""
    most, begun = 0, tuple[int, ...]()
    for node, nbytes in enumerate(own):
        if node in makes:
            yield Moment(most, begun)
            most, begun = 0, tuple(makes[node])
        most = max(most, nbytes)
        if node in drops:
            yield Moment(most, begun, tuple(drops[node]))
            most, begun = 0, ()
    yield Moment(most, begun)


def _made(node: fx.Node, roots: Roots) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The tensors that a node makes, each with the node that stands for its memory."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.target is operator.getitem or node not in roots[node]:
        return
    if isinstance(value, torch.Tensor):
        yield node, value
    elif isinstance(value, list | tuple):
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield parts.get(index, node), item


def _nbytes(tensor: torch.Tensor, growth: float) -> int:
    size: Any = tensor.untyped_storage().nbytes()
    return size if isinstance(size, int) else math.ceil(int(size.node.hint) * growth)
