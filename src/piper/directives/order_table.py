"""The order that a schedule's table asks for: one Order per row, on the ranks of that row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from piper.directives.halves import split_backwards
from piper.errors import Call, MeshError, OrderError, did_you_mean
from piper.ir.directive import Site
from piper.ir.graph import Graph, Order
from piper.ir.select import Selector
from piper.mesh import Slice
from piper.schedules.legality import check
from piper.schedules.table import Action, Row, Table

Member = tuple[Selector, ...]


@dataclass(frozen=True)
class TableOrder:
    """A table bound to an axis of the mesh and to the tags of stage, microbatch and direction."""

    table: Table
    axis: str
    tag: str
    microbatch: str
    direction: str
    stages: Sequence[Sequence[int]] | None

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        """The graph with an Order per row, and with the halves of backwards that the table names."""
        if self.axis not in graph.mesh.names:
            raise MeshError(
                f"the mesh has no axis {self.axis!r}{did_you_mean(self.axis, graph.mesh.names)}",
                call=site.call,
                requirement=4,
                legal=f"mesh {graph.mesh}",
            )
        check(self.table)
        regions = self._regions(graph, site.call)
        self._check_sizes(graph, len(regions), site.call)
        orders = [
            Order(self._groups(row, regions), site.origin, Slice(((self.axis, rank),)))
            for rank, row in enumerate(self.table.rows)
        ]
        graph = self._in_halves(graph, regions)
        return msgspec.structs.replace(graph, orders=(*graph.orders, *orders))

    def _regions(self, graph: Graph, call: Call) -> Sequence[Sequence[int]]:
        """The regions of each stage of the table."""
        known = graph.tag_values.get(self.tag, [])
        if self.stages is None:
            return [(region,) for region in known]
        lists = all(isinstance(members, list | tuple) for members in self.stages)
        named = [region for members in self.stages for region in members] if lists else []
        if sorted(named) != sorted(known):
            raise OrderError(
                f"stages={self.stages} does not have every region of {self.tag} once",
                call=call,
                requirement=4,
                legal=f"lists of the regions {', '.join(map(str, known))}",
            )
        return self.stages

    def _check_sizes(self, graph: Graph, num_stages: int, call: Call) -> None:
        table, tags = self.table, graph.tag_values
        microbatches = len(tags.get(self.microbatch, []))
        per_direction = table.num_microbatches // table.num_directions
        directions = len(tags.get(self.direction, [0]))
        ranks = dict(graph.mesh.axes)[self.axis]
        for what, has, wanted, of in (
            ("rows", table.num_ranks, ranks, f"ranks on {self.axis}"),
            ("stages", table.num_stages, num_stages, f"stages of {self.tag}"),
            ("microbatches", per_direction, microbatches, f"values of {self.microbatch}"),
            ("directions", table.num_directions, directions, f"values of {self.direction}"),
        ):
            if has != wanted:
                raise OrderError(
                    f"the table {table.name} has {has} {what}, but there are {wanted} {of}",
                    call=call,
                    requirement=4,
                    legal=self._legal_sizes(what, has, wanted),
                )

    def _legal_sizes(self, what: str, has: int, wanted: int) -> str:
        if what == "microbatches" and not wanted:
            return f's.split(where(), "{self.microbatch}", {has}) before the order'
        if what == "directions":
            split = f's.split(where(), "{self.direction}", {has}) before the order'
            return f"{split}, and a place for each"
        legal = f"a table with {wanted} {what}"
        if what == "stages":
            legal += ", or several regions a stage: stages=[[0, 1], [2, 3]]"
        return legal

    def _groups(self, row: Row, regions: Sequence[Sequence[int]]) -> tuple[tuple[Member, ...], ...]:
        groups: list[tuple[Member, ...]] = []
        for cell in row:
            members = [self._member(action, regions) for action in cell.actions]
            if cell.joined == "OVERLAP_F_B":
                groups.append(tuple(members))
            else:
                groups += [((selector,),) for member in members for selector in member]
        return tuple(groups)

    def _member(self, action: Action, regions: Sequence[Sequence[int]]) -> Member:
        """The regions of an action in the order in which they run."""
        members = list(regions[action.stage])
        if action.kind != "F":
            members.reverse()
        way = () if action.direction is None else ((self.direction, action.direction),)
        return tuple(
            Selector(((self.tag, region), (self.microbatch, action.microbatch), *way), action.kind)
            for region in members
        )

    def _in_halves(self, graph: Graph, regions: Sequence[Sequence[int]]) -> Graph:
        halves = {
            selector.tags
            for action in self.table.actions()
            if action.kind in ("BI", "BW")
            for selector in self._member(action, regions)
        }
        keys = [self.tag, self.microbatch]
        if self.table.num_directions > 1:
            keys.append(self.direction)
        return split_backwards(
            graph, lambda node: tuple((key, node.tag(key)) for key in keys) in halves
        )
