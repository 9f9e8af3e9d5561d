"""Estimates: nodes of a physical graph and a machine in, the seconds that each takes alone out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.cost.machine import Link, Machine
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.nodes import Accumulate, Comm, Node
from piper.ir.tensor_type import TensorType, dtype_bytes
from piper.mesh import Group

_LINK = Link(10e-6, 50e9, rounds=False)
NOMINAL = Machine(  # where no machine is named
    "nominal",
    {"float32": 200e12},
    2e12,
    node=_LINK,
    network=_LINK,
    ranks_per_node=8,
    launch=5e-6,
    source="round figures of a device of the year 2020",
)

_TASKS = {"chunk": "run", "accumulate": "add"}  # nodes whose tasks have another name


class NodeSeconds:
    """What nodes of a graph take on a machine; `flops` is per body."""

    def __init__(
        self, graph: Graph, flops: Mapping[str, float], machine: Machine = NOMINAL
    ) -> None:
        self.graph = graph
        self.flops = flops
        self.machine = machine
        self._ranks: dict[Group, Sequence[int]] = {}

    def __call__(self, node: Node) -> float:
        values = self.graph.values
        if isinstance(node, Comm):
            kind = communication(node.comm)
            if not kind.brings:
                return 0.0  # the other end takes the time
            found = self.machine.exchange_of(
                kind,
                self._members(node.group),
                brought=sum(values[name].nbytes for name in node.inputs),
            )
            return found.latency + found.seconds
        nbytes, most = 0, (False, 0)
        dtype = ""  # that of its largest parameter, with which products are made, else tensor
        for name in (*node.inputs, *node.outputs):
            type = values[name].type
            nbytes += type.nbytes
            size = (values[name].role in ("param", "param_grad"), type.nbytes)
            if size > most:
                most, dtype = size, type.dtype
        if isinstance(node, Accumulate):
            terms, sums = ([values[n].type for n in ends] for ends in (node.inputs, node.outputs))
            nbytes = added_bytes(terms, sums)
        body = getattr(node, "body", "")
        flops = self.flops.get(body, 0.0)
        return self.machine.work_seconds(
            task_kind(node), body, flops=flops, nbytes=nbytes, dtype=dtype
        )

    def _members(self, group: Group) -> Sequence[int]:
        """One of the groups of ranks that meet; they are alike but for where they lie."""
        known = self._ranks.get(group)
        if known is None:
            mesh = self.graph.mesh
            first = next(iter(mesh.ranks(group.slices[0])))
            known = self._ranks[group] = group.ranks(mesh, first)
        return known


def added_bytes(terms: Sequence[TensorType], sums: Sequence[TensorType]) -> int:
    """Of terms, and of the parts of their sums, or of one, where they lie; without terms, of the sum."""
    if not terms:
        return sums[0].nbytes
    into = sums if len(sums) == len(terms) else [sums[0]] * len(terms)
    pairs = zip(terms, into, strict=True)
    return sum(term.nbytes + term.size * dtype_bytes(total.dtype) for term, total in pairs)


def task_kind(node: Node) -> str:
    """The kind of the task that a node becomes."""
    if isinstance(node, Comm):
        return node.comm
    kind = str(node.__struct_config__.tag)
    return _TASKS.get(kind, kind)
