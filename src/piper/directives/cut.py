"""cut: an untagged model gets the tags of stages, along its modules and balanced by cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from piper.errors import CutError
from piper.ir.directive import Directive, Site
from piper.ir.graph import Graph

_MAY_PRECEDE = ("mesh", "stream")


class Cut(Directive, frozen=True):
    """Cut the model into `num` stages of about equal cost and tag them `tag`=0, 1, ...

    A stage begins where a module begins. Costs of forward and backward are estimated from flops and
    bytes; `costs={"layers.0": 0.002, ...}` gives measured ones instead, in seconds by module path (code
    outside of those modules then costs nothing). `costs="measure"` measures them: modules run alone on
    this machine's device, with `rows` samples or the whole example batch. The history keeps what was
    measured. Inner tags stay: experts nest in their stage. `together=((0, 3), (1, 2))` says which
    stages will lie on one device: then devices are what is balanced.

    Requires:
        1. No node has the tag.
        2. `num` is at least 1, and the model runs through at least so many modules that can be cut
           apart: a change in place is never cut off from what it changes, nor a tagged region in two.
        3. Only mesh and stream come before it.
        4. `together` names every stage once.

    Rewrite:
        s.cut('PP', 2)
        # adds 4 nodes, removes 2 nodes

        - F[] (batch:x a.weight b.weight) -> (%reshape $saved.0)
        - B[] ($saved.0 $one) -> ($d.a.weight/0 $d.b.weight/0)
        + F[PP=0] (batch:x a.weight) -> (%linear $saved.0)
        + F[PP=1] (%linear b.weight) -> (%reshape $saved.1)
        + B[PP=1] ($saved.1 $one) -> ($d.%linear/1 $d.b.weight/1)
        + B[PP=0] ($saved.0 $d.%linear/1) -> ($d.a.weight/0)
        - $d.b.weight/0  param_grad float32[4,4]
        + %linear  activation float32[8,4]
        + $saved.1  saved float32[]
        + $d.%linear/1  grad float32[8,4]
        + $d.b.weight/1  param_grad float32[4,4]

    Example:
        >>> s.cut("PP", 2)
        >>> s.tags["PP"]
        [0, 1]
    """

    tag: str
    num: int
    costs: Mapping[str, float] | Literal["measure"] | None = None
    rows: int | None = None
    together: tuple[tuple[int, ...], ...] | None = None
    recuts: ClassVar[bool] = True

    def settled(self, graph: Graph, site: Site) -> Cut:
        if self.costs != "measure":
            return self
        self._check(graph, site)
        assert site.stages is not None, "only a program can be cut"
        costs = site.stages.measured(self.num, rows=self.rows, call=site.call)
        return msgspec.structs.replace(self, costs=costs, rows=None)

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        self._check(graph, site)
        assert site.stages is not None and not isinstance(self.costs, str)
        cut = site.stages(
            self.tag, self.num, costs=self.costs, together=self.together, call=site.call
        )
        return msgspec.structs.replace(cut, mesh=graph.mesh, streams=graph.streams)

    def _check(self, graph: Graph, site: Site) -> None:
        call = site.call
        if self.tag in graph.tag_values or self.tag in ("phase", "comm"):
            count = len(graph.tag_values.get(self.tag, ()))
            raise CutError(
                f"the tag {self.tag!r} is taken",
                call=call,
                requirement=1,
                details=[f"the model has {count} regions with it"] if count else [],
                legal="a tag that no node has",
            )
        if not isinstance(self.num, int) or self.num < 1:
            raise CutError(
                f"cannot cut into {self.num} stages",
                call=call,
                requirement=2,
                legal="at least 1 stage",
            )
        if self.together is not None:
            named = sorted(stage for group in self.together for stage in group)
            if named != list(range(self.num)):
                raise CutError(
                    f"together={self.together} of {self.num} stages",
                    call=call,
                    requirement=4,
                    legal=f"groups in which each of 0 to {self.num - 1} stands once",
                )
        early = [r.call for r in site.before if r.directive.kind not in _MAY_PRECEDE]
        if early:
            raise CutError(
                f"{early[0]} comes before it",
                call=call,
                requirement=3,
                legal="cut right after mesh and stream, before what selects its stages",
            )
        if isinstance(self.costs, str) and self.costs != "measure":
            raise CutError(
                f"costs={self.costs!r}",
                call=call,
                legal='"measure", or seconds by module path: {"layers.0": 0.002, ...}',
            )
        positive = isinstance(self.rows, int) and self.rows > 0
        if self.rows is not None and (self.costs != "measure" or not positive):
            raise CutError(
                f"rows={self.rows}", call=call, legal='rows of at least 1 with costs="measure"'
            )
