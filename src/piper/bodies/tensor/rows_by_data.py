"""Code of sharded experts, whose number of rows depends on data: ChunkCode in, the same at a number of
rows that no other size is, out; and pieces of that, in which the number of rows is again what comes.

Rules write sizes into code. At a large prime, all that is made of the number of rows is a multiple of
it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from piper.bodies.chunk_code import ChunkCode, ChunkInput
from piper.bodies.cutting.routed import fixed_sizes
from piper.bodies.tensor.changes import Partitioned, Piece
from piper.errors import PiperError
from piper.ir.tensor_type import TensorType

ROWS = 1_000_003  # a prime: no size that a model has is a multiple of it


@dataclass(frozen=True)
class RowsByData:
    """Of experts over `num_ranks`: how many rows one rank's microbatch has, and how many experts there
    are."""

    num_ranks: int
    num_rows: int
    num_experts: int

    @staticmethod
    def of(code: ChunkCode, num_ranks: int) -> RowsByData | None:
        """If a region has rows sorted by expert, and matrices of as many experts."""
        experts = {given.spec.shape[:1] for given in code.inputs if given.param}
        rows = {spec.shape[:1] for spec in code.outputs}
        if len(experts) != 1 or len(rows) != 1 or () in experts | rows:
            return None
        ((num_experts,),), ((num_rows,),) = experts, rows
        others = {given.spec.shape for given in code.inputs if not given.param}
        counts = {shape for shape in others if shape == (num_experts,)}
        if len(counts) != 1 or any(shape[:1] != (num_rows,) for shape in others - counts):
            return None
        return RowsByData(num_ranks, num_rows, num_experts)

    def traced(self, code: ChunkCode) -> ChunkCode:
        """The code as a rank runs it, with its own experts."""

        def one(given: ChunkInput) -> ChunkInput:
            spec = given.spec
            own = given.param or (not given.grad and spec.shape == (self.num_experts,))
            first = self.num_experts // self.num_ranks if own else ROWS
            return replace(given, spec=_with_first(spec, first))

        inputs = tuple(map(one, code.inputs))
        outputs = tuple(_with_first(spec, ROWS) for spec in code.outputs)
        return replace(code, inputs=inputs, outputs=outputs)

    def piece(self, piece: Piece) -> Piece:
        """A piece as its surroundings see it: with all experts, and the microbatch's number of rows."""
        code = piece.code
        inputs = tuple(replace(given, spec=self.whole(given.spec)) for given in code.inputs)
        outputs = tuple(map(self.whole, code.outputs))
        held = [i for i, given in enumerate(code.inputs) if given.spec.shape[:1] == (ROWS,)]
        graph = _counting(code.graph, held[0]) if held else code.graph
        code = replace(code, graph=graph, inputs=inputs, outputs=outputs)
        return Piece(code, piece.inputs, piece.outputs)

    def whole(self, spec: TensorType) -> TensorType:
        """What was traced, as surroundings see it."""
        rows = spec.shape[:1] == (ROWS,)
        return _with_first(spec, self.num_rows if rows else spec.shape[0] * self.num_ranks)


def _with_first(spec: TensorType, first: int) -> TensorType:
    return TensorType((first, *spec.shape[1:]), spec.dtype)


def _counting(graph: fx.Graph, holder: int) -> fx.Graph:
    """The graph with the number of rows of its input `holder` wherever it was written as a number."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    holders = [node for node in new.nodes if node.op == "placeholder"]
    count: list[fx.Node] = []

    def rows_of(times: int) -> fx.Node:
        if not count:
            with new.inserting_after(holders[-1]):
                count.append(new.call_function(torch.ops.aten.sym_size.int, (holders[holder], 0)))
        if times == 1:
            return count[0]
        with new.inserting_after(count[0]):
            return new.call_function(operator.mul, (count[0], times))

    def counted(arg: Any) -> Any:
        if type(arg) is int and arg and arg % ROWS == 0:
            return rows_of(arg // ROWS)
        return arg

    for node in list(new.nodes):
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, counted)
            node.kwargs = fx.node.map_aggregate(node.kwargs, counted)
    return new


def at_any_rows(
    code: ChunkCode, num_ranks: int, cut: Callable[[ChunkCode], Partitioned]
) -> Partitioned:
    """What a cut makes of a chunk; of experts over several ranks, at whatever number of rows comes."""
    rows = RowsByData.of(code, num_ranks) if num_ranks > 1 else None
    if rows is None:
        return cut(code)
    try:
        parts = cut(rows.traced(code))
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, PiperError):
            raise
        raise fixed_sizes(error) from error
    return replace(parts, pieces=[rows.piece(piece) for piece in parts.pieces], as_seen=rows.whole)
