"""order: groups of nodes in sequence, given as selectors or as a schedule's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import msgspec

from piper.directives.halves import split_backwards
from piper.directives.order_table import TableOrder
from piper.errors import Call, OrderError
from piper.ir import graph as ir
from piper.ir.directive import Directive, Site
from piper.ir.graph import Graph
from piper.ir.select import Selector, matching
from piper.schedules.catalog import as_code
from piper.schedules.table import Table

Group = Selector | Sequence[Selector]
_LEGAL = "order([where(...), where(...), ...])"


class _Ordered(Directive, frozen=True):
    groups: Sequence[Group] | Table


class Order(_Ordered, frozen=True, kw_only=True):
    """On each slice, run the nodes of a group after those of the group before it.

    Nothing waits across slices. The members of a group take turns, so that one's communication hides
    behind the other's compute. A backward that a selector names in halves becomes BI and BW.

    Requires:
        1. At least two groups, each a selector or a list of selectors.
        2. No node stands in two groups.
        3. No later group feeds an earlier one.

    Rewrite:
        s.order([where(PP=0, MB=0, phase='BI'), where(PP=0, MB=1, phase='F'), where(PP=0, phase='BW')])
        # adds 4 nodes, removes 2 nodes

        orders + every slice: BI[PP=0,MB=0] => F[PP=0,MB=1] => BW[PP=0]
        - B[PP=0,MB=0] ($saved.0[MB=0] $d.%x/1[MB=0]) -> ($d.a.weight/0[MB=0])
        - B[PP=0,MB=1] ($saved.0[MB=1] $d.%x/1[MB=1]) -> ($d.a.weight/0[MB=1])
        + BI[PP=0,MB=0] ($saved.0[MB=0] $d.%x/1[MB=0]) -> ($kept.F[PP=0,MB=0])
        + BW[PP=0,MB=0] ($kept.F[PP=0,MB=0]) -> ($d.a.weight/0[MB=0])
        + BI[PP=0,MB=1] ($saved.0[MB=1] $d.%x/1[MB=1]) -> ($kept.F[PP=0,MB=1])
        + BW[PP=0,MB=1] ($kept.F[PP=0,MB=1]) -> ($d.a.weight/0[MB=1])
        + $kept.F[PP=0,MB=0]  saved float32[]
        + $kept.F[PP=0,MB=1]  saved float32[]

    Example:
        >>> s.split(where(), "MB", 2)
        >>> s.order([where(MB=0, phase="F"), where(MB=1, phase="F")])
        >>> print(s.history[-1])
        s.order([where(MB=0, phase='F'), where(MB=1, phase='F')])
        >>> s.order([where(MB=0, phase="F"), [where(MB=1, phase="F"), where(MB=0, phase="B")]])
        >>> [len(group) for group in s.graph.orders[-1].groups]
        [1, 2]

    With a table instead of groups:

    Run each rank of `axis` by its row of a schedule's table.

    Stage i of the table is `tag`=i, or the regions `tag`=`stages[i]` one after the other. Of a table
    with two directions, `dK:` is `direction`=K, and microbatches count from 0 in each.

    Requires:
        4. Row r runs on `axis`=r: stages are placed as the table says, and there are as many rows,
           stages, microbatches and directions as ranks, stages of the model and values of
           `microbatch` and `direction`.

    Rewrite:
        s.order(piper.schedules.schedule('gpipe', num_ranks=2, num_microbatches=2))
        # changes no node

        orders + pp=0: F[PP=0,MB=0] => F[PP=0,MB=1] => B[PP=0,MB=0] => B[PP=0,MB=1]
        orders + pp=1: F[PP=1,MB=0] => F[PP=1,MB=1] => B[PP=1,MB=0] => B[PP=1,MB=1]

    Example:
        >>> s.split(where(), "MB", 4)
        >>> s.order(piper.schedules.gpipe(num_ranks=2, num_microbatches=4))
        >>> [str(order.only) for order in s.graph.orders]
        ['pp=0', 'pp=1']
    """

    axis: str = "pp"
    tag: str = "PP"
    microbatch: str = "MB"
    direction: str = "DIR"
    stages: Sequence[Sequence[int]] | None = None
    of_training: ClassVar[bool] = True

    def typed(self) -> Self:
        groups = self.groups
        if isinstance(groups, Iterator):
            groups = list(groups)
        if isinstance(groups, list | tuple):
            groups = [list(group) if isinstance(group, Iterator) else group for group in groups]
        return super(Order, msgspec.structs.replace(self, groups=groups)).typed()

    def arguments(self) -> tuple[list[str], dict[str, Any]]:
        plain, named = super().arguments()
        return ([as_code(self.groups)] if isinstance(self.groups, Table) else plain), named

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        if isinstance(self.groups, Table):
            names = (self.axis, self.tag, self.microbatch, self.direction)
            return TableOrder(self.groups, *names, self.stages).rewrite(graph, site)
        groups = _checked(self.groups, site.call)
        halves = [s for group in groups for s in group if s.phase in ("BI", "BW")]
        full = [msgspec.structs.replace(selector, phase="B") for selector in halves]
        cut = split_backwards(graph, lambda node: any(s.matches(node) for s in full))
        if cut is not graph:
            _check_whole(groups, graph, cut, site.call)
            graph = cut
        members = tuple(tuple((selector,) for selector in group) for group in groups)
        orders = (*graph.orders, ir.Order(members, site.origin))
        return msgspec.structs.replace(graph, orders=orders)


def _check_whole(groups: list[tuple[Selector, ...]], graph: Graph, cut: Graph, call: Call) -> None:
    """Raises if the order cuts all backwards that it also names as a whole."""
    for selector in (s for group in groups for s in group if s.phase == "B"):
        whole = matching(graph, selector)
        if whole and not matching(cut, selector):
            halves = [msgspec.structs.replace(selector, phase=phase) for phase in ("BI", "BW")]
            raise OrderError(
                f"{whole[0]} stands in two groups, in one as a whole and in another in halves",
                call=call,
                requirement=2,
                details=[f"in {selector}"],
                legal=f"{halves[0]} and {halves[1]}",
            )


def _checked(groups: Any, call: Call) -> list[tuple[Selector, ...]]:
    """Every group as a tuple; raises unless there are two, all of selectors."""
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise OrderError(
            f"{groups!r} is no list of groups",
            call=call,
            requirement=1,
            legal=f"piper.schedules.schedule({groups!r}, num_ranks=..., num_microbatches=...)"
            if isinstance(groups, str)
            else _LEGAL,
        )
    tuples = [tuple(g) if isinstance(g, list | tuple) else (g,) for g in groups]
    if not all(isinstance(selector, Selector) for group in tuples for selector in group):
        raise OrderError(
            "a group is made of something else than where(...)",
            call=call,
            requirement=1,
            legal=_LEGAL,
        )
    if len(tuples) < 2 or not all(tuples):
        raise OrderError(
            f"{len(tuples)} groups" if len(tuples) < 2 else "a group is empty",
            call=call,
            requirement=1,
            legal=_LEGAL,
        )
    return tuples
