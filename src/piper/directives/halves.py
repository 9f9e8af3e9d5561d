"""halves: a backward that an order names in two parts, or that is better run so, becomes BI and BW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Node
from piper.ir.values import Value


def split_backwards(
    graph: Graph, wanted: Callable[[Chunk], bool], *, serves: Literal["", "B"] = ""
) -> Graph:
    """Every full backward for which `wanted` holds as BI, with the gradients of activations, and BW,
    with those of parameters. Orders find them by their own phase, or by the one that they serve."""
    nodes: dict[str, Node] = {}
    values: dict[str, Value] = {}
    for name, node in graph.nodes.items():
        if isinstance(node, Chunk) and node.phase == "B" and wanted(node):
            kept = Value(f"$kept.{node.forward}", "saved")
            values[kept.name] = kept
            for half in _halves(graph, msgspec.structs.replace(node, serves=serves), kept.name):
                nodes[half.name] = half
        else:
            nodes[name] = node
    if not values:
        return graph
    return msgspec.structs.replace(graph, nodes=nodes, values={**graph.values, **values})


def _halves(graph: Graph, node: Chunk, kept: str) -> tuple[Chunk, Chunk]:
    weights = tuple(n for n in node.outputs if graph.values[n].role == "param_grad")
    others = tuple(n for n in node.outputs if n not in weights)
    suffix = node.name.removeprefix("B")
    return (
        msgspec.structs.replace(node, name=f"BI{suffix}", phase="BI", outputs=(*others, kept)),
        msgspec.structs.replace(
            node, name=f"BW{suffix}", phase="BW", inputs=(kept,), outputs=weights
        ),
    )
