"""Checkpointed regions in a joint graph in; which of its nodes a backward makes again out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from torch import fx

from piper.bodies.checkpoint_regions import is_saved_by_policy, region_of


@dataclass(frozen=True)
class MadeAgain:
    """`again` is the inside of regions. What is `leaving` a region is saved if it is needed: were it
    made again too, the backward of a region would make all regions before it."""

    again: frozenset[fx.Node] = field(default_factory=frozenset)
    leaving: frozenset[fx.Node] = field(default_factory=frozenset)


def made_again(
    graph: fx.Graph,
    results: Iterable[fx.Node],
    on_tangent: Set[fx.Node],
    root_of: Callable[[fx.Node], fx.Node],
) -> MadeAgain:
    """`results` are those of the forward; `root_of` gives the node whose memory another one shares."""
    calls = [n for n in graph.nodes if n.op == "call_function" and n not in on_tangent]
    regions = {node: region for node in calls if (region := region_of(node)) is not None}
    if not regions:
        return MadeAgain()
    forward = _ancestors(results)
    leaving = {
        root_of(node)
        for node, region in regions.items()
        if any(user in forward and regions.get(user) != region for user in node.users)
    }
    again = {n for n in regions if n not in leaving and not is_saved_by_policy(_operator(n))}
    for node in calls:
        # What autograd adds, such as a scaled mask, has no region of its own.
        added = node not in regions and node not in forward
        if added and any(arg in again for arg in node.all_input_nodes):
            again.add(node)
    return MadeAgain(frozenset(again), frozenset(leaving))


def _operator(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    stack = list(nodes)
    found = set(stack)
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg not in found:
                found.add(arg)
                stack.append(arg)
    return found
