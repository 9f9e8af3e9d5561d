"""Bodies of sharded experts: rows arrive grouped by sender, leave the same way.

The body that runs on a rank regroups the rows by local expert, runs the region's own code with the
local experts and as many rows as came, and undoes the regrouping. All of it is traced together, so
that the backward comes out of AOT as for any other chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from piper.bodies.chunk_code import ChunkCode
from piper.bodies.cutting.joint import Run, runner
from piper.bodies.row_ops import expert_places, put_rows, take_rows
from piper.errors import TraceError
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True)
class Routing:
    """How a region is sharded: over how many ranks, and which inputs are counts and rows; and how many
    times an even share of rows memory is planned for."""

    num_ranks: int
    counts: int
    rows: tuple[int, ...]
    max_load: float


def bounded(rows: TensorType, num_ranks: int) -> TensorType:
    """Rows as they arrive: all ranks may send theirs to one."""
    return TensorType(rows.shape, rows.dtype, rows.shape[0] * num_ranks)


def route(code: ChunkCode, routing: Routing, *, device: str) -> tuple[ChunkCode, Run]:
    """The code as one rank sees it, and the function to trace for it."""
    num_experts = code.inputs[routing.counts].spec.shape[0] // routing.num_ranks
    inputs = []
    for index, given in enumerate(code.inputs):
        spec = given.spec
        if index == routing.counts:
            spec = TensorType((routing.num_ranks, num_experts), spec.dtype)
        elif index in routing.rows:
            spec = bounded(spec, routing.num_ranks)
        elif given.param:
            spec = TensorType((num_experts, *spec.shape[1:]), spec.dtype)
        inputs.append(replace(given, spec=spec))
    inner = runner(code, device=device)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(inputs)
        received = given[routing.counts]
        rows = given[routing.rows[0]].shape[0]
        places = expert_places(received, rows)
        given[routing.counts] = received.sum(0)
        for index in routing.rows:
            given[index] = put_rows(given[index], places)
        try:
            results = inner(*given)
        except (RuntimeError, TypeError) as error:
            raise fixed_sizes(error) from error
        return tuple(take_rows(result, places, 1) for result in results)

    outputs = tuple(bounded(spec, routing.num_ranks) for spec in code.outputs)
    return replace(code, inputs=tuple(inputs), outputs=outputs), run


def fixed_sizes(error: Exception) -> TraceError:
    """Of code that knows how many experts or rows it was written for."""
    return TraceError(
        "the sharded region does not run with fewer experts or another number of rows",
        details=[str(error).strip().splitlines()[0]],
        legal="sizes inside the region come from its inputs, never from constants",
    )
