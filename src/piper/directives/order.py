"""order: groups of nodes in sequence, given as selectors or as a schedule's table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from piper.directives.halves import split_backwards
from piper.errors import Call, MeshError, OrderError, did_you_mean
from piper.ir.graph import Graph, Order
from piper.ir.select import Selector
from piper.mesh import Slice
from piper.schedules.legality import check
from piper.schedules.table import Action, Table

Group = Selector | Sequence[Selector]


def order(graph: Graph, groups: Sequence[Group], *, origin: int, call: Call) -> Graph:
    """On each slice, run the nodes of a group after those of the group before it.

    Requires:
        1. At least two groups, each a selector or a list of selectors.
        2. No node stands in two groups.
        3. No later group feeds an earlier one.

    Rewrite:
        F[MB=0]  F[MB=1]  ->  F[MB=0] => F[MB=1] on every slice; nothing waits across slices.
        The members of a group take turns, so that one's communication hides behind the other's
        compute. B[...] that a selector names in halves -> BI[...], BW[...]

    Example:
        >>> s.split(where(), "MB", 2)
        >>> s.order([where(MB=0, phase="F"), where(MB=1, phase="F")])
        >>> print(s.history[-1])
        s.order([where(MB=0, phase='F'), where(MB=1, phase='F')])
        >>> s.order([where(MB=0, phase="F"), [where(MB=1, phase="F"), where(MB=0, phase="B")]])
        >>> [len(group) for group in s.graph.orders[-1].groups]
        [1, 2]
    """
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise OrderError(
            f"{groups!r} is no list of groups",
            call=call,
            requirement=1,
            legal=f"piper.schedules.schedule({groups!r}, num_ranks=..., num_microbatches=...)"
            if isinstance(groups, str)
            else "order([where(...), where(...), ...])",
        )
    made = tuple(tuple(g) if isinstance(g, list | tuple) else (g,) for g in groups)
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
    halves = [s for group in made for s in group if s.phase in ("BI", "BW")]
    full = [msgspec.structs.replace(selector, phase="B") for selector in halves]
    graph = split_backwards(graph, lambda node: any(s.matches(node) for s in full))
    groups_of_members = tuple(tuple((selector,) for selector in group) for group in made)
    return _with(graph, (Order(groups_of_members, origin),))


def order_table(
    graph: Graph,
    table: Table,
    *,
    axis: str,
    tag: str,
    microbatch: str,
    direction: str,
    stages: Sequence[Sequence[int]] | None,
    origin: int,
    call: Call,
) -> Graph:
    """Run each rank of `axis` by its row of a schedule's table.

    Stage i of the table is `tag`=i, or the regions `tag`=`stages[i]` one after the other. Of a table
    with two directions, `dK:` is `direction`=K, and microbatches count from 0 in each.

    Requires:
        4. Row r runs on `axis`=r: stages are placed as the table says, and there are as many rows,
           stages, microbatches and directions as ranks, stages of the model and values of
           `microbatch` and `direction`.

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
            table.num_microbatches // table.num_directions,
            len(graph.tag_values.get(microbatch, [])),
            f"values of {microbatch}",
        ),
        (
            "directions",
            table.num_directions,
            len(graph.tag_values.get(direction, [0])),
            f"values of {direction}",
        ),
    ]
    for what, has, wanted, of in facts:
        if has != wanted:
            legal = f"a table with {wanted} {what}"
            if what == "microbatches" and not wanted:
                legal = f's.split(where(), "{microbatch}", {has}) before the order'
            elif what == "directions":
                legal = (
                    f's.split(where(), "{direction}", {has}) before the order, and a place for each'
                )
            elif what == "stages":
                legal += ", or several regions a stage: stages=[[0, 1], [2, 3]]"
            raise OrderError(
                f"the table {table.name} has {has} {what}, but there are {wanted} {of}",
                call=call,
                requirement=4,
                legal=legal,
            )
    made = []
    halves: set[tuple[tuple[str, int], ...]] = set()
    for rank, row in enumerate(table.rows):
        groups: list[tuple[tuple[Selector, ...], ...]] = []
        for cell in row:
            members = [
                _selectors(action, values, tag, microbatch, direction) for action in cell.actions
            ]
            for action, member in zip(cell.actions, members, strict=True):
                if action.kind in ("BI", "BW"):
                    halves.update(selector.tags for selector in member)  # type: ignore[misc]
            if cell.joined == "OVERLAP_F_B":
                groups.append(tuple(members))
            else:
                groups += [((selector,),) for member in members for selector in member]
        made.append(Order(tuple(groups), origin, Slice(((axis, rank),))))
    keys = [tag, microbatch, *([direction] if table.num_directions > 1 else [])]
    graph = split_backwards(
        graph, lambda node: tuple((key, node.tag(key)) for key in keys) in halves
    )
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


def _selectors(
    action: Action, values: Sequence[Sequence[int]], tag: str, microbatch: str, direction: str
) -> tuple[Selector, ...]:
    """The regions of an action in the order in which they run."""
    regions = list(values[action.stage])
    if action.kind != "F":
        regions.reverse()
    way = () if action.direction is None else ((direction, action.direction),)
    return tuple(
        Selector(((tag, region), (microbatch, action.microbatch), *way), action.kind)
        for region in regions
    )


def _with(graph: Graph, orders: tuple[Order, ...]) -> Graph:
    return msgspec.structs.replace(graph, orders=(*graph.orders, *orders))
