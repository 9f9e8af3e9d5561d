"""A program's file: its graph and history in, versioned JSON out; and back, checked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.directives.registry import read_directive
from piper.errors import PlanError
from piper.ir.form.graph_frame import check_frame
from piper.ir.form.serial import decode_versioned
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.nodes import Chunk
from piper.ir.well_formed import verify

VERSION = 2


class ProgramFile(msgspec.Struct, frozen=True):
    """What a program is, but for the model that it was traced from."""

    graph: Graph
    history: tuple[Record, ...]
    version: int = VERSION


def program_to_json(graph: Graph, history: tuple[Record, ...]) -> bytes:
    return msgspec.json.encode(ProgramFile(graph, tuple(history)))


def program_from_json(data: bytes) -> ProgramFile:
    """The graph and the history of a program; raises PlanError unless each fits the other."""
    program = decode_versioned(
        data, ProgramFile, version=VERSION, hook=read_directive, name="program"
    )
    graph = program.graph
    if graph.level != "logical":
        raise PlanError("not a Piper program: its graph is not a logical one")
    check_frame(graph)
    verify(graph)
    for where, origin in _origins(graph):
        if not -1 <= origin < len(program.history):
            raise PlanError(
                f"not a Piper program: {where} comes from directive {origin}",
                legal=f"one of the {len(program.history)} directives of its history",
            )
    for node in graph.nodes.values():
        if program.history and node.slice is None:
            raise PlanError(f"not a Piper program: {node.name} is placed nowhere")
    for node in graph.chunks:
        if node.phase != "F" and not isinstance(graph.nodes.get(node.forward), Chunk):
            raise PlanError(f"not a Piper program: {node.name} is the backward of no forward")
    for name, value in graph.values.items():
        if name != value.name or (value.role in _BELONG and value.of not in graph.values):
            raise PlanError(f"not a Piper program: {name} belongs to no Value")
        if value.role in _BELONG and value.type != graph.values[value.of].type:
            raise PlanError(f"not a Piper program: {name} is not as {value.of}, its Value")
    return program


_BELONG = ("grad", "param_grad")


def _origins(graph: Graph) -> Iterator[tuple[str, int]]:
    """What directives made, with their numbers."""
    for node in graph.nodes.values():
        yield node.name, node.origin
        for owner in getattr(node, "owners", ()):
            yield f"the owner of axis {owner.axis} of {node.name}", owner.origin
    for split in graph.splits:
        yield f"the split {split.tag}", split.origin
    for order in graph.orders:
        yield "an order", order.origin
