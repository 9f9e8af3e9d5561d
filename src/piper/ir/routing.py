"""The form of a region whose experts can be sharded: which inputs are counts, rows and weights."""

from __future__ import annotations

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk

_INTEGERS = ("int32", "int64")
_OTHERS = ("param", "key")  # never counts nor rows


class ExpertForm(msgspec.Struct, frozen=True):
    """Positions among a chunk's inputs: the counts, and the token-major rows."""

    counts: int
    rows: tuple[int, ...]
    num_experts: int


def expert_form(graph: Graph, node: Chunk) -> tuple[ExpertForm | None, str]:
    """The form of a forward chunk, or None and what is missing."""
    values = [graph.values[name] for name in node.inputs]
    params = [value for value in values if value.role == "param"]
    if not params:
        return None, "it has no parameters"
    if any(not value.shape for value in params):
        return None, "a parameter has no dim 0"
    num_experts = params[0].shape[0]
    for value in params:
        if value.shape[0] != num_experts:
            sizes = f"{params[0].name} has {num_experts}, {value.name} {value.shape[0]}"
            return None, f"parameters disagree on the number of experts: {sizes}"
    counts = [
        index
        for index, value in enumerate(values)
        if value.dtype in _INTEGERS and value.shape == (num_experts,) and value.role not in _OTHERS
    ]
    if len(counts) != 1:
        found = "no" if not counts else f"{len(counts)}"
        return None, f"it has {found} integer input of shape [{num_experts}]"
    rows = tuple(
        index
        for index, value in enumerate(values)
        if value.role not in _OTHERS and index != counts[0]
    )
    outputs = [graph.values[name] for name in node.outputs if graph.values[name].role != "saved"]
    lengths = {
        (graph_value.shape or (0,))[0] for graph_value in (*(values[i] for i in rows), *outputs)
    }
    if not rows:
        return None, "it has no token-major input"
    if len(lengths) != 1:
        return None, f"inputs and outputs differ in their number of rows ({sorted(lengths)})"
    return ExpertForm(counts[0], rows, num_experts), ""


def counts_of(graph: Graph, node: Chunk) -> str:
    """The Value with the counts of a sharded chunk, or of the forward of one."""
    forward = graph.nodes[node.forward] if node.forward else node
    assert isinstance(forward, Chunk)
    form, problem = expert_form(graph, forward)
    if form is None:
        raise PlanError(f"{node.name} cannot be sharded: {problem}")
    return forward.inputs[form.counts]
