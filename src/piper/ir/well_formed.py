"""Well-formedness of a graph at its level: raises PlanError with the first broken rule."""

from __future__ import annotations

from piper.errors import PlanError
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Layouts, change_between
from piper.ir.nodes import Accumulate, Chunk, Comm, Update
from piper.ir.order.sorting import find_cycle
from piper.ir.values import SUMMED, made_for

_GIVEN = ("batch", "key", "param", "buffer", "constant", "coordinate", "flat", "shard")
_SUMS = (*SUMMED, "gradient")


def verify(graph: Graph, *, closed: bool = True) -> None:
    """Every Value has a producer of its kind, every edge a node at both ends, and no cycle. While a
    physical graph is not `closed`, nodes may still read Values of other slices."""
    values, producers = graph.values, graph.producers
    for name, node in graph.nodes.items():
        if name != node.name:
            _broken("a node is filed under another name", name, node.name)
        for value in node.outputs:
            if value not in values:
                _broken("a node names a Value that does not exist", name, value)
        for value in node.inputs:
            if value not in values:
                _broken("a node names a Value that does not exist", name, value)
            if value not in producers and values[value].role not in _GIVEN:
                _broken("a Value is read but never written", name, value)
    for value, writers in producers.items():
        role = values[value].role
        if role in _GIVEN and not values[value].base and not values[value].source:
            _broken("a given Value is written", writers[0], value)
        if len(writers) > 1 and role not in _SUMS:
            _broken("a Value is written twice", *writers[:2], value)
    for edge in graph.edges:
        if edge.before not in graph.nodes or edge.after not in graph.nodes:
            _broken("an order edge has no node at one end", edge.before, edge.after)
    cycle = [] if _in_order(graph) else find_cycle(graph)
    if cycle:
        _broken("the graph has a cycle", " -> ".join(cycle))
    if graph.level == "physical" and closed:
        _verify_physical(graph)


def _in_order(graph: Graph) -> bool:
    """Whether every node stands behind all that it waits for, so that there can be no cycle."""
    done: set[str] = set()
    producers = graph.producers
    for name, node in graph.nodes.items():
        if type(node) is Update:
            if not done.issuperset(graph.predecessors(node)):
                return False
        else:
            for value in node.inputs:
                for source in producers.get(value, ()):
                    if source not in done:
                        return False
        done.add(name)
    position = {name: index for index, name in enumerate(graph.nodes)}
    return all(position[e.before] < position[e.after] for e in graph.edges if not e.issued)


def _verify_physical(graph: Graph) -> None:
    values = graph.values
    for node in graph.nodes.values():
        at = node.slice
        if at is None:
            _broken("a physical node has no slice", node.name)
        for name in (*node.inputs, *node.outputs):
            value = values[name]
            if value.slice is not at and value.slice != at and value.role != "wire":
                _broken("a node touches a Value of another slice", node.name, name)
    for edge in graph.edges:
        if graph.nodes[edge.before].slice != graph.nodes[edge.after].slice:
            _broken("an order edge crosses slices", edge.before, edge.after)
    ends: dict[str, list[Comm]] = {}
    for comm in graph.comms:
        ends.setdefault(comm.key, []).append(comm)
    for key, members in ends.items():
        kinds = [communication(member.comm) for member in members]
        slices = {member.slice for member in members}
        if any(kind.is_message for kind in kinds):
            if sorted(kind.sends for kind in kinds if kind.is_message) != [False, True]:
                _broken("a message needs one send and one recv", key)
            if len(kinds) != 2:
                _broken("a message has two ends", key)
        elif len(set(kinds)) > 1:
            _broken("a collective is of one kind", key)
        elif slices != set(members[0].group.slices) or len(members) != len(slices):
            _broken("a collective needs one node on each slice of its group", key)
    for node in graph.nodes.values():
        if isinstance(node, Chunk) and node.phase != "F" and node.forward not in graph.nodes:
            _broken("a backward has no forward", node.name)
    _verify_layouts(graph)


def _verify_layouts(graph: Graph) -> None:
    """Every collective is a row of the table of changes, and terms lie as the sum does."""
    values, mesh = graph.values, graph.mesh
    for node in graph.nodes.values():
        if isinstance(node, Comm):
            kind = communication(node.comm)
            if kind.is_message:
                continue
            made, read = values[node.inputs[0]], values[node.outputs[0]]
            change, axes = change_between(made_for(made, read), read.layout, mesh)
            if kind.keeps_layout and change:
                _broken("a collective changes the layout that it keeps", node.name)
            elif kind.keeps_layout:
                continue
            if (change or "all_reduce", axes) != (node.comm, node.group.over):
                _broken("a collective is not the change between its layouts", node.name)
        elif isinstance(node, Accumulate):
            wanted = _partial(graph, node.outputs[0])
            total = values[node.outputs[0]].layout
            for name in node.inputs:
                if not _alike(values[name].layout, total) and (
                    not node.offsets or _partial(graph, name) != wanted
                ):
                    _broken("a term lies otherwise than its sum", node.name, name)


def _alike(term: Layouts, total: Layouts) -> bool:
    """Whether a term lies as its sum does. What is shared is the same on all ranks, as what is
    replicated: the gradient of a partial sum may reach it by readers of both kinds."""
    return _without_shared(term) == _without_shared(total)


def _without_shared(layouts: Layouts) -> Layouts:
    return tuple((axis, REPLICATED if way == SHARED else way) for axis, way in layouts)


def _partial(graph: Graph, name: str) -> set[str]:
    """The axes along which a Value is yet to be summed."""
    layouts = graph.values[name].layout
    return {axis for axis, way in layouts if way == PARTIAL and graph.mesh.size_of((axis,)) > 1}


def _broken(rule: str, *where: str) -> None:
    raise PlanError(f"malformed graph: {rule}", details=where)
