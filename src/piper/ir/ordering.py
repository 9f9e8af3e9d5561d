"""Orders into order edges: what `order` was told in, pairs of nodes on one slice out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, zip_longest

import msgspec

from piper.errors import Call, OrderError
from piper.ir.graph import Graph, Order, OrderEdge
from piper.ir.select import Selector, select
from piper.ir.sorting import find_cycle, find_path
from piper.mesh import Slice


def resolve_orders(graph: Graph, calls: Sequence[Call]) -> tuple[OrderEdge, ...]:
    """All order edges of the graph. `calls[origin]` is the directive, for errors.

    On each slice the nodes of one group follow those of the group before; the members of a group
    take turns. Nothing is ever ordered across slices. Communication exists in a physical graph only, so
    that orders that name some are resolved there.
    """
    edges: list[OrderEdge] = []
    place: dict[tuple[int, str], int] = {}  # (order number, node) -> its group
    for number, order in enumerate(graph.orders):
        if graph.level == "logical" and any(s.comm for group in order.groups for s in group):
            continue
        for sequence in _sequences(graph, order, calls[order.origin], number, place):
            edges += [OrderEdge(a, b, order.origin) for a, b in pairwise(sequence)]
    cycle = find_cycle(graph, extra=tuple(edges))
    if cycle:
        _refuse_cycle(graph, cycle, edges, place, calls)
    return tuple(edges)


def _sequences(
    graph: Graph, order: Order, call: Call, number: int, place: dict[tuple[int, str], int]
) -> list[list[str]]:
    """The node sequence of each slice."""
    rows: dict[Slice | None, list[str]] = defaultdict(list)
    for index, group in enumerate(order.groups):
        members = [_member(graph, selector, order, call) for selector in group]
        for name in (name for member in members for name in member):
            if (number, name) in place:
                raise OrderError(
                    f"{name} stands in two groups",
                    call=call,
                    requirement=2,
                    details=[f"groups {place[number, name] + 1} and {index + 1}"],
                )
            place[number, name] = index
        for name in _take_turns(members):
            rows[graph.nodes[name].slice].append(name)
    return list(rows.values())


def _member(graph: Graph, selector: Selector, order: Order, call: Call) -> list[str]:
    if order.only is None:
        return select(graph, selector, call=call)
    # A stage through which no gradient passes has no backward, whatever the table says.
    found = select(graph, msgspec.structs.replace(selector, phase=None), call=call)
    found = [name for name in found if selector.matches(graph.nodes[name])]
    elsewhere = [n for n in found if graph.nodes[n].slice != order.only]
    if elsewhere:
        raise OrderError(
            f"the table runs {elsewhere[0]} on {order.only}, but it is placed on "
            f"{graph.nodes[elsewhere[0]].slice}",
            call=call,
            requirement=4,
            legal=f"place(..., mesh.at({order.only})) for every stage of that row",
        )
    return found


def _take_turns(members: list[list[str]]) -> list[str]:
    return [name for turn in zip_longest(*members) for name in turn if name is not None]


def _refuse_cycle(
    graph: Graph,
    cycle: list[str],
    edges: list[OrderEdge],
    place: dict[tuple[int, str], int],
    calls: Sequence[Call],
) -> None:
    asked = {(edge.before, edge.after): edge.origin for edge in edges}
    before, after = next(pair for pair in pairwise(cycle) if pair in asked)
    origin = asked[before, after]
    groups = {name: group + 1 for (_, name), group in place.items()}
    path = find_path(graph, after, before)
    details = [f"group {groups[before]}  {before}  needs  {after}  of group {groups[after]}"]
    details.append(f"path     {' -> '.join(path or cycle)}")
    raise OrderError(
        "a later group may not feed an earlier one",
        call=calls[origin],
        requirement=3,
        details=details,
        legal=f"{after} before {before}",
    )
