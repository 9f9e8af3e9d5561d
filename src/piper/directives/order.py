"""order: groups of nodes in sequence, given as selectors or as a schedule's table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.errors import Call, MeshError, OrderError, did_you_mean
from piper.ir.graph import Graph, Order
from piper.ir.select import Selector
from piper.mesh import Slice
from piper.schedules.check import check
from piper.schedules.table import Action, Table

Group = Selector | Sequence[Selector]


def order(graph: Graph, groups: Sequence[Group], *, origin: int, call: Call) -> Graph:
    """On each slice, run the nodes of a group after those of the group before it.

    Requires:
        1. At least two groups, each a selector or a list of selectors.
        2. No node stands in two groups.
        3. No later group feeds an earlier one.

    Rewrite:
        F[MB=0]  F[MB=1]  ->  F[MB=0] => F[MB=1] on every slice; nothing waits across slices

    Example:
        >>> s.split(where(), "MB", 2)
        >>> s.order([where(MB=0, phase="F"), where(MB=1, phase="F")])
        >>> print(s.history[-1])
        s.order([where(MB=0, phase='F'), where(MB=1, phase='F')])
    """
    if isinstance(groups, str):
        raise OrderError(
            f"{groups!r} is no list of groups",
            call=call,
            requirement=1,
            legal=f"piper.schedules.schedule({groups!r}, num_ranks=..., num_microbatches=...)",
        )
    made = tuple((group,) if isinstance(group, Selector) else tuple(group) for group in groups)
    if not all(isinstance(selector, Selector) for group in made for selector in group):
        raise OrderError(
            "a group is made of something else than where(...)",
            call=call,
            requirement=1,
            legal="order([where(...), where(...), ...])",
        )
    if len(made) < 2 or not all(made):
        raise OrderError(
            f"{len(made)} groups" if len(made) < 2 else "a group is empty",
            call=call,
            requirement=1,
            legal="order([where(...), where(...), ...])",
        )
    return _with(graph, (Order(made, origin),))


def order_table(
    graph: Graph,
    table: Table,
    *,
    axis: str,
    tag: str,
    microbatch: str,
    stages: Sequence[Sequence[int]] | None,
    origin: int,
    call: Call,
) -> Graph:
    """Run each rank of `axis` by its row of a schedule's table.

    Stage i of the table is `tag`=i, or the regions `tag`=`stages[i]` one after the other.

    Requires:
        4. Row r runs on `axis`=r: stages are placed as the table says, and there are as many rows,
           stages and microbatches as ranks, stages of the model and `microbatch` values.

    Rewrite:
        row r = 0F0 0F1 0B0 ...  ->  F[PP=0,MB=0] => F[PP=0,MB=1] => B[PP=0,MB=0] => ... at pp=r

    Example:
        >>> s.split(where(), "MB", 4)
        >>> s.order(piper.schedules.gpipe(num_ranks=2, num_microbatches=4))
        >>> [str(order.only) for order in s.graph.orders]
        ['pp=0', 'pp=1']
    """
    sizes = dict(graph.mesh.axes)
    if axis not in sizes:
        raise MeshError(
            f"the mesh has no axis {axis!r}{did_you_mean(axis, graph.mesh.names)}",
            call=call,
            requirement=4,
            legal=f"mesh {graph.mesh}",
        )
    check(table)
    values = [(value,) for value in graph.tag_values.get(tag, [])] if stages is None else stages
    if stages is not None:
        _check_regions(graph, tag, stages, call)
    facts = [
        ("rows", table.num_ranks, sizes[axis], f"ranks on {axis}"),
        ("stages", table.num_stages, len(values), f"stages of {tag}"),
        (
            "microbatches",
            table.num_microbatches,
            len(graph.tag_values.get(microbatch, [])),
            f"values of {microbatch}",
        ),
    ]
    for what, has, wanted, of in facts:
        if has != wanted:
            legal = f"a table with {wanted} {what}"
            if what == "microbatches" and not wanted:
                legal = f's.split(where(), "{microbatch}", {has}) before the order'
            elif what == "stages":
                legal += ", or several regions a stage: stages=[[0, 1], [2, 3]]"
            raise OrderError(
                f"the table {table.name} has {has} {what}, but there are {wanted} {of}",
                call=call,
                requirement=4,
                legal=legal,
            )
    _check_supported(table, call)
    made = []
    for rank, row in enumerate(table.rows):
        groups: list[tuple[Selector, ...]] = []
        for cell in row:
            members = [_selectors(action, values, tag, microbatch) for action in cell.actions]
            if cell.joined != "OVERLAP_F_B":
                groups += [(selector,) for member in members for selector in member]
            elif all(len(member) == 1 for member in members):
                groups.append(tuple(selector for member in members for selector in member))
            else:
                raise OrderError(
                    f"the table {table.name} overlaps stages of several regions",
                    call=call,
                    requirement=4,
                    legal="one region per stage",
                )
        made.append(Order(tuple(groups), origin, Slice(((axis, rank),))))
    return _with(graph, tuple(made))


def _check_regions(graph: Graph, tag: str, stages: Sequence[Sequence[int]], call: Call) -> None:
    lists = all(isinstance(members, list | tuple) for members in stages)
    named = [region for members in stages for region in members] if lists else []
    regions = graph.tag_values.get(tag, [])
    if sorted(named) != sorted(regions):
        raise OrderError(
            f"stages={stages} does not have every region of {tag} once",
            call=call,
            requirement=4,
            legal=f"lists of the regions {', '.join(map(str, regions))}",
        )


def _check_supported(table: Table, call: Call) -> None:
    halves = sorted({action.kind for action in table.actions()} - {"F", "B"})
    problem = ""
    if table.num_directions > 1:
        problem = "runs in two directions"
    elif halves:
        problem = f"splits the backward ({', '.join(halves)})"
    if problem:
        raise OrderError(
            f"the table {table.name} {problem}, which is not supported yet",
            call=call,
            requirement=4,
            legal="tables of F and B: gpipe, 1f1b, eager_1f1b, looped_bfs, interleaved_1f1b, your own",
        )


def _selectors(
    action: Action, values: Sequence[Sequence[int]], tag: str, microbatch: str
) -> list[Selector]:
    """The regions of an action in the order in which they run."""
    regions = list(values[action.stage])
    if action.kind != "F":
        regions.reverse()
    return [
        Selector(((tag, region), (microbatch, action.microbatch)), action.kind)
        for region in regions
    ]


def _with(graph: Graph, orders: tuple[Order, ...]) -> Graph:
    return msgspec.structs.replace(graph, orders=(*graph.orders, *orders))
