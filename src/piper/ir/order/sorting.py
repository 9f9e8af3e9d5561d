"""Topological facts about a graph: successors, an order, a cycle if there is one, a path."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import Update


def data_successors(graph: Graph) -> dict[str, list[str]]:
    """Node -> nodes that wait for it because of Values alone. To be read only: it is made once."""
    following: dict[str, list[str]] | None = graph.__dict__.get("data_successors")
    if following is None:
        following = {name: [] for name in graph.nodes}
        producers = graph.producers
        for name, node in graph.nodes.items():
            if type(node) is Update:
                sources: Iterable[str] = graph.predecessors(node)
            else:
                sources = {source for value in node.inputs for source in producers.get(value, ())}
            for source in sources:
                following[source].append(name)
        graph.__dict__["data_successors"] = following
    return following


def reordered(graph: Graph, names: Iterable[str]) -> Graph:
    """The same graph with its nodes in another order. What is known of its edges stays known."""
    nodes = graph.nodes
    return rewired(graph, nodes={name: nodes[name] for name in names})


def rewired(graph: Graph, **changes: Any) -> Graph:
    """The same nodes in another order, or with other order edges."""
    result = msgspec.structs.replace(graph, **changes)
    for index in ("data_successors", "producers", "readers"):
        if index in graph.__dict__:
            result.__dict__[index] = graph.__dict__[index]
    return result


def edge_successors(edges: Iterable[OrderEdge]) -> dict[str, list[str]]:
    """Node -> nodes that wait for it because of order edges."""
    following: dict[str, list[str]] = {}
    for edge in edges:
        following.setdefault(edge.before, []).append(edge.after)
    return following


def sorted_topologically(graph: Graph) -> Graph:
    """The same graph with every node after those it waits for; otherwise the order stays."""
    following = data_successors(graph)
    ordered = edge_successors(edge for edge in graph.edges if not edge.issued)
    waiting = _waiting(following, ordered)
    position = {name: index for index, name in enumerate(graph.nodes)}
    ready = [position[name] for name, count in waiting.items() if count == 0]
    names = list(graph.nodes)
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for target in (*following[name], *ordered.get(name, ())):
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, position[target])
    if len(order) != len(names):
        raise PlanError("the graph has a cycle", details=[" -> ".join(find_cycle(graph))])
    return reordered(graph, order)


def find_cycle(graph: Graph, extra: tuple[OrderEdge, ...] = ()) -> list[str]:
    """The nodes of one cycle, first repeated at the end; empty if the graph is acyclic."""
    following = data_successors(graph)
    ordered = edge_successors((*(edge for edge in graph.edges if not edge.issued), *extra))
    waiting = _waiting(following, ordered)
    ready = [name for name, count in waiting.items() if count == 0]
    for name in ready:  # grows as it is read
        for target in following[name]:
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
        for target in ordered.get(name, ()):
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    if len(ready) == len(waiting):
        return []
    return _some_cycle(following, ordered, waiting.keys() - set(ready))


def _waiting(*successors: Mapping[str, list[str]]) -> dict[str, int]:
    """Node -> how many it waits for; all nodes are keys of the first."""
    waiting = dict.fromkeys(successors[0], 0)
    for following in successors:
        for targets in following.values():
            for target in targets:
                waiting[target] += 1
    return waiting


def _some_cycle(
    following: Mapping[str, list[str]], ordered: Mapping[str, list[str]], left: Set[str]
) -> list[str]:
    """Every node left has a predecessor that is left: walk backwards until one repeats."""
    before: dict[str, str] = {}
    for name in (name for name in following if name in left):
        for target in (*following[name], *ordered.get(name, ())):
            if target in left:
                before.setdefault(target, name)
    path = [next(iter(before))]
    while path[-1] not in path[:-1]:
        path.append(before[path[-1]])
    loop = path[path.index(path[-1]) :]
    return loop[::-1]


def find_path(graph: Graph, start: str, goal: str) -> list[str]:
    """A shortest path of data edges from `start` to `goal`, or nothing."""
    following = data_successors(graph)
    came: dict[str, str] = {start: start}
    queue = deque([start])
    while queue:
        name = queue.popleft()
        if name == goal:
            path = [name]
            while path[-1] != start:
                path.append(came[path[-1]])
            return path[::-1]
        for target in following[name]:
            if target not in came:
                came[target] = name
                queue.append(target)
    return []
