"""Orders into order edges: what `order` was told in, pairs of nodes on one slice out."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import NoReturn

import msgspec

from piper.errors import Call, OrderError
from piper.ir.graph import Graph, Order, OrderEdge
from piper.ir.order.overlap import issue_edges, talking
from piper.ir.order.sorting import find_cycle, find_path, rewired
from piper.ir.select import Selector, select
from piper.mesh import Slice


@dataclass
class _Resolved:
    """What the orders of a graph come to."""

    edges: list[OrderEdge] = field(default_factory=list)
    overlaps: list[tuple[str, ...]] = field(default_factory=list)
    place: dict[tuple[int, str], int] = field(default_factory=dict)  # (order, node) -> its group


def resolve_orders(graph: Graph, calls: Sequence[Call], *, device: str = "cpu") -> Graph:
    """The graph with all its order edges. `calls[origin]` is the directive, for errors.

    On each slice the nodes of one group follow those of the group before; the members of a group
    take turns. Nothing is ever ordered across slices. Communication exists in a physical graph only, so
    that orders that name some are resolved there.
    """
    resolved = _Resolved()
    for number, order in enumerate(graph.orders):
        selectors = [s for group in order.groups for member in group for s in member]
        if graph.level == "logical" and any(s.comm for s in selectors):
            continue
        for sequence in _sequences(graph, order, calls[order.origin], number, resolved):
            resolved.edges += [OrderEdge(a, b, order.origin) for a, b in pairwise(sequence)]
    issued = [e for turns in resolved.overlaps for e in issue_edges(graph, turns, device=device)]
    if not issued or find_cycle(graph, extra=(*resolved.edges, *issued)):
        cycle = find_cycle(graph, extra=tuple(resolved.edges))
        if cycle:
            _refuse_cycle(graph, cycle, resolved, calls)
        if issued:
            warnings.warn(
                "groups of an order run one chunk after the other, without putting communication "
                "behind each other's chunks: it would wait in a circle",
                stacklevel=2,
            )
        issued = []
    resolved.edges += issued
    edges = (*graph.edges, *resolved.edges)
    return rewired(graph, edges=edges, overlaps=tuple(resolved.overlaps))


def _sequences(
    graph: Graph, order: Order, call: Call, number: int, resolved: _Resolved
) -> list[list[str]]:
    """The node sequence of each slice."""
    rows: dict[Slice | None, list[str]] = defaultdict(list)
    place = resolved.place
    for index, group in enumerate(order.groups):
        members = [
            [name for selector in member for name in _selected(graph, selector, order, call)]
            for member in group
        ]
        for name in (name for member in members for name in member):
            if (number, name) in place:
                raise OrderError(
                    f"{name} stands in two groups",
                    call=call,
                    requirement=2,
                    details=[f"groups {place[number, name] + 1} and {index + 1}"],
                )
            place[number, name] = index
        if len(members) == 1:
            for name in members[0]:
                rows[graph.nodes[name].slice].append(name)
            continue
        for at in dict.fromkeys(graph.nodes[n].slice for member in members for n in member):
            local = [[n for n in member if graph.nodes[n].slice == at] for member in members]
            turns = _take_turns(graph, local)
            rows[at] += turns
            if graph.level == "physical" and sum(map(bool, local)) > 1:
                resolved.overlaps.append(tuple(turns))
    return list(rows.values())


def _selected(graph: Graph, selector: Selector, order: Order, call: Call) -> list[str]:
    if selector.comm == "all_gather":
        raise OrderError(
            f"{selector} names gathers, which start by prefetch before each use or after an Update",
            call=call,
            legal="replicate(..., prefetch=...) for when they start",
        )
    if order.only is None and graph.level == "logical":
        return select(graph, selector, call=call)
    # A stage through which no gradient passes has no backward, and a half may have nothing to do.
    names = select(graph, msgspec.structs.replace(selector, phase=None), call=call)
    names = [name for name in names if selector.matches(graph.nodes[name])]
    elsewhere = [n for n in names if order.only and graph.nodes[n].slice != order.only]
    if elsewhere:
        raise OrderError(
            f"the table runs {elsewhere[0]} on {order.only}, but it is placed on "
            f"{graph.nodes[elsewhere[0]].slice}",
            call=call,
            requirement=4,
            legal=f"place(..., mesh.at({order.only})) for every stage of that row",
        )
    return names


def _take_turns(graph: Graph, members: list[list[str]]) -> list[str]:
    """Members alternate if any of them communicates, so that one hides behind the other. A turn lasts
    until a chunk that communication follows; what comes before it has nothing to hide."""
    ends = [set(member) for member in members]  # all that a logical graph knows
    if graph.level == "physical":
        ends = [talking(graph, member) for member in members]
        if not any(ends):
            return [name for member in members for name in member]
    turns = [_parted(member, behind) for member, behind in zip(members, ends, strict=True)]
    return [name for each in zip_longest(*turns, fillvalue=[]) for turn in each for name in turn]


def _parted(names: Sequence[str], behind: set[str]) -> list[list[str]]:
    """Names in runs, each of which ends with one of `behind`, or is the last."""
    runs: list[list[str]] = [[]]
    for name in names:
        runs[-1].append(name)
        if name in behind:
            runs.append([])
    return runs


def _refuse_cycle(
    graph: Graph, cycle: list[str], resolved: _Resolved, calls: Sequence[Call]
) -> None:
    asked = {(edge.before, edge.after): edge.origin for edge in resolved.edges}
    pairs = [pair for pair in pairwise(cycle) if pair in asked]
    before, after = next((p for p in pairs if find_path(graph, p[1], p[0])), pairs[0])
    path = find_path(graph, after, before)
    if not path:
        _refuse_contradiction(cycle, asked, calls)
    origin = asked[before, after]
    groups = {
        name: group + 1
        for (number, name), group in resolved.place.items()
        if graph.orders[number].origin == origin
    }
    details = [f"group {groups[before]}  {before}  needs  {after}  of group {groups[after]}"]
    details.append(f"path     {' -> '.join(path)}")
    raise OrderError(
        "a later group may not feed an earlier one",
        call=calls[origin],
        requirement=3,
        details=details,
        legal=f"{after} before {before}",
    )


def _refuse_contradiction(
    cycle: list[str], asked: dict[tuple[str, str], int], calls: Sequence[Call]
) -> NoReturn:
    """Several orders, or groups of one on several slices, that are possible only one by one."""
    pairs = [pair for pair in pairwise(cycle) if pair in asked]
    raise OrderError(
        "orders contradict each other",
        call=calls[max(asked[pair] for pair in pairs)],
        requirement=3,
        details=[f"{a}  before  {b}  by {calls[asked[a, b]]}" for a, b in pairs],
        legal=f"without one of them: {' -> '.join(cycle)} is a cycle",
    )
