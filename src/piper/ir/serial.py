"""Versioned JSON of a graph: Graph in, bytes out, and back."""

from __future__ import annotations

import msgspec

from piper.errors import PlanError
from piper.ir.graph import VERSION, Graph


def graph_to_json(graph: Graph) -> bytes:
    return msgspec.json.encode(graph)


def graph_from_json(data: bytes) -> Graph:
    try:
        graph = msgspec.json.decode(data, type=Graph)
    except msgspec.DecodeError as error:
        raise PlanError(f"not a Piper graph: {error}") from None
    if graph.version != VERSION:
        raise PlanError(f"graph version {graph.version} is not readable; this is {VERSION}")
    return graph
