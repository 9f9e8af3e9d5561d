"""Draft: the physical graph while passes add to it."""

from __future__ import annotations

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import Node
from piper.ir.values import Value
from piper.mesh import Slice


class Draft:
    """Nodes and Values of a physical graph, by name; `graph()` closes it. There are `lanes` streams for
    communication of a kind, where no directive names one. It is for a kind of `device`. `edges` are
    what no directive asks for."""

    def __init__(self, logical: Graph, lanes: int, device: str) -> None:
        self.logical = logical
        self.lanes = lanes
        self.device = device
        self.nodes: dict[str, Node] = {}
        self.values: dict[str, Value] = {}
        self.edges: list[OrderEdge] = []

    def node(self, node: Node) -> None:
        if node.name in self.nodes:
            raise PlanError(f"two nodes are called {node.name}")
        self.nodes[node.name] = node

    def value(self, value: Value) -> str:
        self.values.setdefault(value.name, value)
        return value.name

    def like(self, value: Value, name: str, at: Slice | None, **changes: object) -> str:
        """A Value like another one, elsewhere or under another name."""
        return self.value(msgspec.structs.replace(value, name=name, slice=at, **changes))

    def graph(self) -> Graph:
        return msgspec.structs.replace(
            self.logical,
            level="physical",
            nodes=self.nodes,
            values=self.values,
            edges=tuple(self.edges),
        )


def lane(graph: Graph, stream: str, number: int) -> str:
    """The stream of that lane; the first is the stream itself, and one that is declared has no other."""
    declared = any(each.name == stream for each in graph.streams)
    return f"{stream}:{number}" if number and not declared else stream


def at_slice(name: str, at: Slice | None) -> str:
    return f"{name}@{at}"
