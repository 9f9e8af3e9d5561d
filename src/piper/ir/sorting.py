"""Topological facts about a graph: successors, a cycle if there is one, a path between nodes."""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph, OrderEdge


def successors(graph: Graph, extra: tuple[OrderEdge, ...] = ()) -> dict[str, list[str]]:
    """Node -> nodes that wait for it, over data edges, order edges and `extra` ones."""
    found: dict[str, list[str]] | None = graph.__dict__.get("successors")
    if found is None:
        found = {name: [] for name in graph.nodes}
        for node in graph.nodes.values():
            for before in graph.predecessors(node):
                found[before].append(node.name)
        for edge in graph.edges:
            if not edge.issued:
                found[edge.before].append(edge.after)
        graph.__dict__["successors"] = found
    if extra:
        found = {name: list(targets) for name, targets in found.items()}
        for edge in extra:
            found[edge.before].append(edge.after)
    return found


def sorted_topologically(graph: Graph) -> Graph:
    """The same graph with every node after those it waits for; otherwise the order stays."""
    following = successors(graph)
    waiting = dict.fromkeys(graph.nodes, 0)
    for targets in following.values():
        for target in targets:
            waiting[target] += 1
    position = {name: index for index, name in enumerate(graph.nodes)}
    ready = [position[name] for name, count in waiting.items() if count == 0]
    names = list(graph.nodes)
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for target in following[name]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, position[target])
    if len(order) != len(names):
        raise PlanError("the graph has a cycle", details=[" -> ".join(find_cycle(graph))])
    return msgspec.structs.replace(graph, nodes={name: graph.nodes[name] for name in order})


def find_cycle(graph: Graph, extra: tuple[OrderEdge, ...] = ()) -> list[str]:
    """The nodes of one cycle, first repeated at the end; empty if the graph is acyclic."""
    following = successors(graph, extra)
    waiting = dict.fromkeys(following, 0)
    for targets in following.values():
        for target in targets:
            waiting[target] += 1
    ready = deque(name for name, count in waiting.items() if count == 0)
    while ready:
        name = ready.popleft()
        del waiting[name]
        for target in following[name]:
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    if not waiting:
        return []
    # Every node left has a predecessor that is left: walk backwards until one repeats.
    before: dict[str, str] = {}
    for name in waiting:
        for target in following[name]:
            if target in waiting:
                before.setdefault(target, name)
    path = [next(iter(before))]
    while path[-1] not in path[:-1]:
        path.append(before[path[-1]])
    loop = path[path.index(path[-1]) :]
    return loop[::-1]


def find_path(graph: Graph, start: str, goal: str) -> list[str]:
    """A shortest path of data edges from `start` to `goal`, or nothing."""
    following = successors(graph)
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
