"""lower: all passes in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.errors import Call, OrderError, PiperError, PlanError, SplitError
from piper.ir.graph import Graph
from piper.ir.ordering import resolve_orders
from piper.ir.sorting import sorted_topologically
from piper.ir.well_formed import verify
from piper.mesh import Slice
from piper.passes.bind import GetBodies, bind_bodies
from piper.passes.buckets import Bucketed, make_buckets
from piper.passes.clip import measure_norm
from piper.passes.gradients import hold_parameters, reduce_gradients, update_parameters
from piper.passes.list_schedule import crossed_messages, schedule
from piper.passes.loss import report_loss
from piper.passes.pace import pace
from piper.passes.transfers import transfer_values
from piper.passes.whole import check_whole
from piper.plan.types import Optimizer


def data_axes(graph: Graph) -> tuple[str, ...]:
    """The axes that share the batch: those that no place fixes, unless an owner says that they share
    something else; ranks that share experts share the batch too."""
    first = next(iter(graph.nodes.values())).slice or Slice()
    other = {o.axis for n in graph.chunks for o in n.owners if o.shares not in ("batch", "experts")}
    return tuple(axis for axis in graph.mesh.free(first) if axis not in other)


def local_rows(graph: Graph, batch_size: int, calls: Sequence[Call]) -> int:
    """Samples per microbatch on one rank; raises if the batch does not divide."""
    data_ranks = graph.mesh.size_of(data_axes(graph))
    pieces = data_ranks * graph.num_microbatches
    if batch_size % pieces:
        call = calls[graph.splits[-1].origin] if graph.splits else Call("lower")
        raise SplitError(
            f"a batch of {batch_size} does not divide into {data_ranks} data ranks x "
            f"{graph.num_microbatches} microbatches",
            call=call,
            requirement=3,
            legal=f"a batch that is a multiple of {pieces}",
        )
    return batch_size // pieces


def lower_graph(
    logical: Graph,
    *,
    bodies: GetBodies,
    flops: Mapping[str, float],
    calls: Sequence[Call],
    device: str = "cpu",
    clip: float | None = None,
    late: bool = False,
    optimizer: Optimizer | None = None,
    trained: Bucketed | None = None,
) -> tuple[Graph, Bucketed]:
    """The physical graph in dispatch order, and its buckets.

    With the buckets of training, `trained`, it is an evaluation, which keeps parameters as they are
    there and changes none.
    """
    draft = bind_bodies(logical, bodies)
    slices = sorted({node.slice or Slice() for node in logical.nodes.values()})
    axes = data_axes(logical)
    divisor = report_loss(draft, slices, axes)
    bucketed = trained or make_buckets(logical, calls)
    if trained is not None:
        hold_parameters(draft, bucketed)
    else:
        if optimizer is not None:
            check_whole(optimizer, logical, bucketed, calls)
        gradients = reduce_gradients(draft, bucketed)
        clipping = None
        if clip is not None:
            clipping = measure_norm(
                draft, bucketed, gradients, slices=slices, largest=clip, late=late
            )
        update_parameters(draft, bucketed, gradients, divisor, clipping)
    transfer_values(draft)
    graph = sorted_topologically(draft.graph())
    graph = resolve_orders(graph, calls, device=device)
    try:
        graph = schedule(graph, flops)
    except PlanError as error:
        raise _order_error(graph, calls, str(error)) from None
    crossed = crossed_messages(graph)
    if crossed:
        raise _order_error(graph, calls, "sent {} before {}, received {} first".format(*crossed))
    graph = pace(graph, bucketed)
    verify(graph)
    return graph, bucketed


def _order_error(graph: Graph, calls: Sequence[Call], reason: str) -> PiperError:
    """Only an order that names communication can make ranks wait for each other."""
    named = [o for o in graph.orders if any(s.comm for g in o.groups for m in g for s in m)]
    if not named:
        return PlanError(reason)
    return OrderError(
        "ranks would wait for each other",
        call=calls[named[-1].origin],
        requirement=3,
        details=[reason],
        legal="communication in the order in which both sides can have it",
    )
