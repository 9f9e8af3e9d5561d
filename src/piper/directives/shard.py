"""shard: experts of a region split over an axis; tokens travel to where their expert lives."""

from __future__ import annotations

import math
from functools import partial
from urllib.parse import unquote

from piper.directives.owning import axes_of, check_stream, own
from piper.errors import Call, ShardError
from piper.ir.directive import Selecting, Site
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Owner
from piper.ir.routing import counts_of, expert_form
from piper.ir.select import select

DEFAULT_STREAM = "exchange"
MAX_LOAD = 2.0


class Shard(Selecting, frozen=True, kw_only=True):
    """Give each rank along `over` its part of the selected regions' experts.

    Lowering exchanges the counts, reads them on the host, sends every row to the rank of its expert
    (all_to_all), runs the region there, and sends the results back the same way. Memory is planned for
    ranks that get up to `max_load` times the rows of an even share; more rows are no error, and take
    more memory than planned.

    Requires:
        1. `over` names axes of the mesh.
        2. No selected chunk has another owner of those axes.
        3. Each region is one chunk with one integer input counts[E], token-major inputs and outputs
           [N, ...] sorted by expert with N = sum(counts), and parameters whose dim 0 is E.
        4. E is a multiple of the number of ranks along `over`.
        5. No random operation is inside: its numbers would depend on how rows are spread.
        6. `max_load` is a number, at least 1.

    Rewrite:
        s.shard(where(EP=0), over='ep')
        # changes 2 nodes

        F[EP=0]  B[EP=0]
            owners + Owner(axis=ep, how=shard, shares=experts, stream=exchange, origin=1, max_load=2.0)
        batch:x  w  $d.w/1
            layout {} -> {ep: split(0)}
        %grouped_mm_default
            layout {} -> {ep: routed(%counts)}

    Example:
        >>> s.shard(where(EP="*"), over="ep")
        >>> s.graph.values["stages.0.moe.experts.up"].layout
        (('ep', Split(dim=0)),)
    """

    over: str | tuple[str, ...]
    stream: str | None = None
    max_load: float = MAX_LOAD

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        call = site.call
        load = self.max_load
        if isinstance(load, bool) or not isinstance(load, int | float) or not 1 <= load < math.inf:
            raise ShardError(
                f"max_load={load!r}",
                call=call,
                requirement=6,
                legal="1.0 where rows are spread evenly, or more",
            )
        axes = axes_of(graph, self.over, call=call)
        names = select(graph, self.selector, call=call)
        size = graph.mesh.size_of(axes)
        for name in names:
            node = graph.nodes[name]
            assert isinstance(node, Chunk)
            if node.phase == "F":
                _check_form(graph, node, size, call)
        stream = check_stream(graph, self.stream, call=call) if self.stream else DEFAULT_STREAM
        owner = Owner("", "shard", "experts", stream, site.origin, max_load=load)
        return own(graph, names, axes, owner, call=call, counts=partial(counts_of, graph))


def _check_form(graph: Graph, node: Chunk, size: int, call: Call) -> None:
    for value in (graph.values[name] for name in node.inputs):
        if value.role == "key":
            operation, _, place = unquote(value.of).partition("@")
            raise ShardError(
                f"{node.name} draws random numbers: {operation} ({place})",
                call=call,
                requirement=5,
                legal="random operations before or after the region",
            )
    form, problem = expert_form(graph, node)
    if form is None:
        raise ShardError(
            f"{node.name} cannot be sharded: {problem}",
            call=call,
            requirement=3,
            details=[_signature(graph, node)],
            legal="tag only experts(rows [N, ...], counts [E]) -> [N, ...]; sort rows by expert "
            "before the region and put them back after it",
        )
    if form.num_experts % size:
        raise ShardError(
            f"{form.num_experts} experts do not divide over {size} ranks",
            call=call,
            requirement=4,
            details=[node.name],
            legal=f"a number of ranks that divides {form.num_experts}",
        )


def _signature(graph: Graph, node: Chunk) -> str:
    def show(name: str) -> str:
        value = graph.values[name]
        return f"{name} {value.dtype}{list(value.shape)}"

    outputs = [name for name in node.outputs if graph.values[name].role != "saved"]
    return f"({', '.join(map(show, node.inputs))}) -> ({', '.join(map(show, outputs))})"
