"""lower: the complete logical graph in; through all passes, in their order; the tasks of every rank out.

To add a pass, write a function of a Lowering and give it a line in PASSES.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from piper.cost.estimate import NOMINAL, NodeSeconds
from piper.cost.machine import Machine
from piper.errors import Call, OrderError, PiperError, PlanError, SplitError, did_you_mean
from piper.ir.graph import Graph, Stream
from piper.ir.order.ordering import resolve_orders
from piper.ir.order.sorting import sorted_topologically
from piper.ir.precisions import Precision
from piper.ir.well_formed import verify
from piper.mesh import Group, Slice
from piper.passes.dispatch.early_messages import early_messages
from piper.passes.dispatch.emit import emit
from piper.passes.dispatch.hold_again import hold_again
from piper.passes.dispatch.leave_free import leave_free
from piper.passes.dispatch.list_schedule import Ordered, crossed_messages, schedule
from piper.passes.dispatch.pace import pace
from piper.passes.dispatch.passing_sums import passing_sums
from piper.passes.dispatch.take_turns import take_turns
from piper.passes.physical.bind import GetBodies, bind_bodies
from piper.passes.physical.buckets import WIDE_ENOUGH, Bucketed, check_gathers, make_buckets
from piper.passes.physical.clip import Clip, measure_norm
from piper.passes.physical.draft import Draft
from piper.passes.physical.gradients import hold_parameters, reduce_gradients, update_parameters
from piper.passes.physical.loss import Divisor, report_loss
from piper.passes.physical.transfers import transfer_values
from piper.passes.physical.whole import check_whole
from piper.plan.cadence import Cadence
from piper.plan.optimizers import Grouping
from piper.plan.types import RankClass

WORTH_TWO = (
    1.25  # exchanges at once that are as fast as one: with fewer, a second lane gains little
)


@dataclass
class Lowering:
    """What passes are given, and what they have made so far.

    With the buckets of training, `trained`, it is an evaluation, which keeps parameters as they are
    there and changes none.
    """

    logical: Graph
    bodies: GetBodies
    flops: Mapping[str, float]
    calls: Sequence[Call]
    device: str = "cpu"
    clip: float | None = None
    late: bool = False
    grouping: Grouping | None = None
    precision: Precision = WIDE_ENOUGH
    trained: Bucketed | None = None
    machine: Machine = NOMINAL
    cadences: tuple[Cadence, ...] = ()  # for what directives leave open

    draft: Draft = field(init=False)
    divisor: Divisor = field(init=False)
    bucketed: Bucketed = field(init=False)
    gradients: dict[tuple[int, Slice], str] = field(default_factory=dict)
    clipping: Clip | None = None
    physical: Graph | None = None  # the draft once it is closed
    ordered: Ordered | None = None  # as list scheduling has left it
    classes: tuple[RankClass, ...] = ()
    streams: tuple[Stream, ...] = ()
    groups: tuple[Group, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # pass -> how long it took

    @property
    def graph(self) -> Graph:
        """The physical graph as it is now."""
        return self.physical or self.draft.graph()

    @property
    def lanes(self) -> int:
        """Streams for communication of a kind, where no directive names one."""
        return 2 if self.machine.lanes >= WORTH_TWO else 1

    @property
    def slices(self) -> list[Slice]:
        return sorted({node.slice or Slice() for node in self.logical.nodes.values()})


class Pass(NamedTuple):
    """A named step of lowering; `close` says that every Value is where its readers are from then on."""

    name: str
    run: Callable[[Lowering], None]
    close: bool = True


def _bind(state: Lowering) -> None:
    state.draft = bind_bodies(state.logical, state.bodies, state.lanes, state.device)


def _total_loss(state: Lowering) -> None:
    state.divisor = report_loss(state.draft, state.slices, data_axes(state.logical))


def _fill_buckets(state: Lowering) -> None:
    grouping = state.grouping
    state.bucketed = state.trained or make_buckets(
        state.logical,
        state.calls,
        grouping,
        state.precision,
        state.cadences,
        lanes=state.lanes,
    )
    check_gathers(state.logical, state.bucketed, state.calls)
    if grouping is not None and state.trained is None:
        check_whole(grouping, state.logical, state.bucketed, state.calls)


def _reduce_gradients(state: Lowering) -> None:
    if state.trained is None:
        state.gradients = reduce_gradients(state.draft, state.bucketed)


def _measure_norm(state: Lowering) -> None:
    if state.clip is not None:
        state.clipping = measure_norm(
            state.draft,
            state.bucketed,
            state.gradients,
            slices=state.slices,
            largest=state.clip,
            late=state.late,
        )


def _update_parameters(state: Lowering) -> None:
    if state.trained is not None:
        hold_parameters(state.draft, state.bucketed)
    else:
        update_parameters(
            state.draft, state.bucketed, state.gradients, state.divisor, state.clipping
        )


def _transfer(state: Lowering) -> None:
    transfer_values(state.draft)


def _sort(state: Lowering) -> None:
    state.physical = sorted_topologically(state.draft.graph())


def _order(state: Lowering) -> None:
    state.physical = resolve_orders(state.graph, state.calls, device=state.device)


def _hold_again(state: Lowering) -> None:
    state.physical = hold_again(state.graph)


def _take_turns(state: Lowering) -> None:
    for cadence in state.cadences:
        if cadence.under_way:
            state.physical = take_turns(state.graph, cadence.under_way, cadence.origin)


def _schedule(state: Lowering) -> None:
    try:
        ordered = schedule(state.graph, NodeSeconds(state.graph, state.flops, state.machine))
    except PlanError as error:
        raise _order_error(state, str(error)) from None
    state.physical, state.ordered = ordered.graph, ordered
    crossed = crossed_messages(state.graph)
    if crossed:
        raise _order_error(state, "sent {} before {}, received {} first".format(*crossed))


def _pass_sums(state: Lowering) -> None:
    state.physical = passing_sums(state.graph)


def _pace(state: Lowering) -> None:
    state.physical = pace(state.graph, state.bucketed)


def _leave_free(state: Lowering) -> None:
    if state.device != "cpu":
        seconds = NodeSeconds(state.graph, state.flops, state.machine)
        state.physical = leave_free(state.graph, seconds)


def _verify(state: Lowering) -> None:
    verify(state.graph)


def _emit(state: Lowering) -> None:
    state.classes, state.streams, state.groups = emit(state.graph, state.bucketed)


def _early_messages(state: Lowering) -> None:
    if state.device == "cpu":
        state.classes = tuple(map(early_messages, state.classes))


PASSES = (
    Pass("bind", _bind, close=False),  # chunks get their code; rows travel to their experts
    Pass("loss", _total_loss, close=False),  # sums over everything; what gradients are divided by
    Pass("buckets", _fill_buckets, close=False),  # parameters that are reduced and kept together
    Pass("gradients", _reduce_gradients, close=False),  # over microbatches, ranks and slices
    Pass("norm", _measure_norm, close=False),  # of all gradients, for clipping
    Pass("updates", _update_parameters, close=False),  # the optimizer; gathers of what it changed
    Pass("transfers", _transfer, close=False),  # messages to readers on other slices
    Pass("sort", _sort),  # every node behind those that it waits for
    Pass("orders", _order),  # the user's orders as edges
    Pass("again", _hold_again),  # what is computed again is not, before it is needed
    Pass("turns", _take_turns),  # at most some microbatches under way, if that was chosen
    Pass("schedule", _schedule),  # one global order by list scheduling
    Pass("sums", _pass_sums),  # whether gradients lie in the place of their sums
    Pass("pace", _pace),  # gathers for each use; receives and reductions held in step
    Pass("room", _leave_free),  # what products leave to the communication beside them
    Pass("verify", _verify),  # the physical graph is well-formed
    Pass("emit", _emit),  # slots, waits and frees of every class of ranks
    Pass("messages", _early_messages),  # on a CPU, right behind what they wait for
)


VERIFY_EACH = False  # a test has the loop look at the graph after every pass


def run_passes(state: Lowering, *, last: str = PASSES[-1].name) -> Lowering:
    """Run all passes, or those up to the `last` one, and time them."""
    names = [each.name for each in PASSES]
    if last not in names:
        near = did_you_mean(last, names)
        raise PlanError(f"no pass is called {last!r}{near}", legal=", ".join(names))
    for each in PASSES[: names.index(last) + 1]:
        begin = time.perf_counter()
        each.run(state)
        state.seconds[each.name] = time.perf_counter() - begin
        if VERIFY_EACH:
            verify(state.graph, closed=each.close)
    return state


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


def _order_error(state: Lowering, reason: str) -> PiperError:
    """Only an order that names communication can make ranks wait for each other."""
    orders = state.graph.orders
    named = [o for o in orders if any(s.comm for g in o.groups for m in g for s in m)]
    if not named:
        return PlanError(reason)
    return OrderError(
        "ranks would wait for each other",
        call=state.calls[named[-1].origin],
        requirement=3,
        details=[reason],
        legal="communication in the order in which both sides can have it",
    )
