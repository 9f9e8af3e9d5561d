"""Estimates: floating-point operations and bytes in, seconds out, for a nominal device and link."""

from __future__ import annotations

from collections.abc import Mapping

from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Comm, Node

FLOPS_PER_SECOND = 200e12
BYTES_PER_SECOND = 2e12
LINK_BYTES_PER_SECOND = 50e9
LAUNCH = 5e-6  # what the smallest piece of work costs
LATENCY = 10e-6  # what the smallest message costs


def estimate(graph: Graph, node: Node, flops: Mapping[str, float]) -> float:
    """Seconds that a node takes alone. `flops` is per body."""
    if isinstance(node, Comm):
        kind = communication(node.comm)
        if not kind.brings:
            return 0.0  # the other end takes the time
        brought = sum(graph.values[name].nbytes for name in node.inputs)
        left = sum(graph.values[name].nbytes for name in node.outputs)
        carried = kind.carries(brought, left, node.group.size(graph.mesh))
        return LATENCY + carried / LINK_BYTES_PER_SECOND
    touched = sum(graph.values[name].nbytes for name in (*node.inputs, *node.outputs))
    work = flops.get(node.body, 0.0) if isinstance(node, Chunk) else 0.0
    return LAUNCH + seconds(work, touched)


def seconds(flops: float, nbytes: float) -> float:
    """What so much work takes while so many bytes are touched."""
    return max(flops / FLOPS_PER_SECOND, nbytes / BYTES_PER_SECOND)
