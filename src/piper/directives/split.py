"""split: the batch cut into microbatches; every node once per microbatch, with a new tag."""

from __future__ import annotations

import msgspec

from piper.errors import Call, SplitError
from piper.ir import graph as ir
from piper.ir.directive import Selecting, Site
from piper.ir.graph import Graph
from piper.ir.layouts import Layouts, Routed
from piper.ir.layouts import Split as SplitLayout
from piper.ir.nodes import Chunk, Node
from piper.ir.select import select
from piper.ir.tensor_type import TensorType
from piper.ir.values import Value

_SHARED = ("param", "buffer", "constant", "coordinate")  # one for all microbatches


class Split(Selecting, frozen=True):
    """Cut the batch into `num` microbatches and tag the copies `tag`=0, 1, ...

    Requires:
        1. The selector takes in all chunks: there is one batch.
        2. `tag` is new, and `num` at least 1.
        3. The batch, shared out over the data ranks, divides by `num` (checked when lowered).

    Rewrite:
        s.split(where(), 'MB', 2)
        # adds 4 nodes, removes 2 nodes

        splits + Split(tag=MB, num=2, origin=0)
        - F[PP=0] (batch:x a.weight) -> (%reshape $saved.0)
        - B[PP=0] ($saved.0 $one) -> ($d.a.weight/0)
        + F[PP=0,MB=0] (batch:x[MB=0] a.weight) -> (%reshape[MB=0] $saved.0[MB=0])
        + F[PP=0,MB=1] (batch:x[MB=1] a.weight) -> (%reshape[MB=1] $saved.0[MB=1])
        + B[PP=0,MB=0] ($saved.0[MB=0] $one) -> ($d.a.weight/0[MB=0])
        + B[PP=0,MB=1] ($saved.0[MB=1] $one) -> ($d.a.weight/0[MB=1])
        - batch:x  batch float32[8,4]
        - %reshape  loss float32[]
        - $saved.0  saved float32[]
        - $d.a.weight/0  param_grad float32[4,4]
        + batch:x[MB=0]  batch float32[4,4]
        + %reshape[MB=0]  loss float32[]
        + $saved.0[MB=0]  saved float32[]
        + $d.a.weight/0[MB=0]  param_grad float32[4,4]
        + batch:x[MB=1]  batch float32[4,4]
        + %reshape[MB=1]  loss float32[]
        + $saved.0[MB=1]  saved float32[]
        + $d.a.weight/0[MB=1]  param_grad float32[4,4]

    Example:
        >>> s.split(where(), "MB", 2)
        >>> [name for name in s.graph.nodes if name.startswith("F[PP=0,EP=0")]
        ['F[PP=0,EP=0,MB=0]', 'F[PP=0,EP=0,MB=1]']
    """

    tag: str
    num: int

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        self._check(graph, site.call)
        shared = {name for name, value in graph.values.items() if value.role in _SHARED}
        nodes: dict[str, Node] = {}
        values: dict[str, Value] = {name: graph.values[name] for name in shared}
        types = {name: _microbatch(value, self.num) for name, value in graph.values.items()}
        for index in range(self.num):
            renamed = {
                name: name if name in shared else with_tag(name, self.tag, index)
                for name in graph.values
            }
            for name, value in graph.values.items():
                if name not in shared:
                    values[renamed[name]] = msgspec.structs.replace(
                        value,
                        name=renamed[name],
                        of=renamed.get(value.of, value.of),
                        source=renamed.get(value.source, value.source),
                        type=types[name],
                        layout=_renamed(value.layout, renamed),
                    )
            for node in graph.nodes.values():
                copy = _copy(node, self.tag, index, renamed)
                nodes[copy.name] = copy
        splits = (*graph.splits, ir.Split(self.tag, self.num, site.origin))
        return msgspec.structs.replace(
            graph, nodes=_forwards_first(nodes), values=values, splits=splits
        )

    def _check(self, graph: Graph, call: Call) -> None:
        names = select(graph, self.selector, call=call)
        if len(names) != len(graph.nodes):
            missed = next(name for name in graph.nodes if name not in set(names))
            raise SplitError(
                f"{self.selector} leaves out {missed}", call=call, requirement=1, legal="where()"
            )
        taken = self.tag in graph.tag_values or self.tag in ("phase", "comm")
        if not isinstance(self.num, int) or self.num < 1 or taken:
            raise SplitError(
                f"cannot split into {self.num} with the tag {self.tag!r}",
                call=call,
                requirement=2,
                legal="at least 1 microbatch, and a tag that no node has",
            )
        samples = _samples(graph)
        if samples is not None and self.num > samples:
            raise SplitError(
                f"{samples} samples cannot be split into {self.num}",
                call=call,
                requirement=3,
                legal=f"at most {samples} microbatches, and a number that divides",
            )


def _samples(graph: Graph) -> int | None:
    """How many samples one microbatch has, over all data ranks."""
    for value in graph.values.values():
        if value.role == "batch" and isinstance(value.batch, SplitLayout):
            return value.shape[value.batch.dim or 0]
    return None


def _microbatch(value: Value, num: int) -> TensorType:
    """The type of one of `num` parts of a Value."""
    dim = value.batch.dim if isinstance(value.batch, SplitLayout) else None
    if dim is None:
        return value.type
    shape = (*value.shape[:dim], value.shape[dim] // num, *value.shape[dim + 1 :])
    return msgspec.structs.replace(value.type, shape=shape)


def _renamed(layouts: Layouts, names: dict[str, str]) -> Layouts:
    """Layouts that name counts, with the names of one microbatch."""
    return tuple(
        (axis, Routed(names[layout.by]) if isinstance(layout, Routed) else layout)
        for axis, layout in layouts
    )


def with_tag(name: str, tag: str, value: int) -> str:
    """`x` -> `x[MB=0]`, `F[PP=1]` -> `F[PP=1,MB=0]`."""
    if name.endswith("[]"):
        return f"{name[:-1]}{tag}={value}]"
    if name.endswith("]"):
        return f"{name[:-1]},{tag}={value}]"
    return f"{name}[{tag}={value}]"


def _copy(node: Node, tag: str, index: int, renamed: dict[str, str]) -> Node:
    assert isinstance(node, Chunk)
    return msgspec.structs.replace(
        node,
        name=with_tag(node.name, tag, index),
        tags=(*node.tags, (tag, index)),
        inputs=tuple(renamed[name] for name in node.inputs),
        outputs=tuple(renamed[name] for name in node.outputs),
        forward=with_tag(node.forward, tag, index) if node.forward else "",
    )


def _forwards_first(nodes: dict[str, Node]) -> dict[str, Node]:
    """Copies arrive microbatch by microbatch; all forwards before all backwards reads better."""
    return dict(sorted(nodes.items(), key=lambda item: getattr(item[1], "phase", "") != "F"))
