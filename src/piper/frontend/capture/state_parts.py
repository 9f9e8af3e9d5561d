"""State: a captured graph in; apart from it, the code that gives buffers their next content, out.

A training forward may change buffers: running statistics, counters, averages. Where the loss does not
depend on such a buffer, the code that reads it is taken out of the graph, and what that code takes from
the rest is `given` to it. Where the loss does, the code stays, on a copy, and the copy is the next
content. Either way a graph is left that changes nothing it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from piper.bodies.captured_nodes import OF_STATE, callee, source_of, value_of
from piper.errors import TraceError
from piper.frontend.capture.interpret import Facts
from piper.frontend.refuse.state import Origin


@dataclass(frozen=True)
class StatePart:
    """Code that makes the next content of `buffers`, from them and from what is `given` to it.

    `graph` has a placeholder for each of both and returns the buffers' next content. What is `carried`
    is read by the microbatch that follows.
    """

    buffers: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    graph: fx.Graph
    carried: bool


def changed_buffers(origins: Mapping[fx.Node, Origin], facts: Facts) -> list[fx.Node]:
    """The buffers that the graph changes, as its placeholders."""
    changed = {memory for changes in facts.changes.values() for memory in changes}
    return [n for n, o in origins.items() if o.role == "buffer" and facts.memory[n] & changed]


def take_state(
    graph: fx.Graph, buffers: list[fx.Node], facts: Facts, results: Iterable[fx.Node]
) -> tuple[StatePart, ...]:
    """Take the code that changes `buffers` out of the graph, or have it work on copies."""
    live = _reached(results, facts)
    carried = [buffer for buffer in buffers if buffer in live]
    folded = [buffer for buffer in buffers if buffer not in live]
    parts = [_take(graph, part, facts) for part in _related(graph, folded, facts)]
    return (*parts, *(_carry(graph, buffer) for buffer in carried))


def mark_state(graph: fx.Graph, facts: Facts, results: Iterable[fx.Node]) -> None:
    """Mark the code that no result depends on: state alone needs it."""
    live = _reached(results, facts)
    for node in graph.nodes:
        if node not in live:
            node.meta[OF_STATE] = True


def _reached(results: Iterable[fx.Node], facts: Facts) -> set[fx.Node]:
    """All nodes that some results depend on."""
    stack = list(results)
    reached = set(stack)
    while stack:
        for node in facts.inputs(stack.pop()):
            if node not in reached:
                reached.add(node)
                stack.append(node)
    return reached


def _related(graph: fx.Graph, buffers: list[fx.Node], facts: Facts) -> list[dict[fx.Node, None]]:
    """Buffers, each with the nodes that depend on it, those that have some in common together."""
    sets = [{buffer: None} for buffer in buffers]
    for node in graph.nodes:
        touched = [s for s in sets if any(arg in s for arg in facts.inputs(node))]
        if not touched or node.op == "output":
            continue
        first, *others = touched
        for other in others:
            first |= other
            sets.remove(other)
        first[node] = None
    return sets


def _take(graph: fx.Graph, members: dict[fx.Node, None], facts: Facts) -> StatePart:
    """Move nodes into a graph of their own."""
    buffers = [node for node in members if node.op == "placeholder"]
    moved = [node for node in graph.nodes if node in members and node not in buffers]
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in buffers}
    given: list[fx.Node] = []
    fixed = _fixed(graph, facts)
    for node in moved:
        if node in facts.random:
            raise TraceError(
                f"{callee(node)} changes a buffer by random numbers ({source_of(node)})",
                legal="numbers drawn in make_model, or state that depends on data alone",
            )
        for arg in node.all_input_nodes:
            if arg not in members and arg not in copies and arg not in fixed:
                given.append(_final(graph, arg, node, facts))
                copies[arg] = part.placeholder(arg.name)
    # A graph's inputs come before its code; copies of buffers are what the code changes.
    copies |= {node: part.call_method("clone", (copies[node],)) for node in buffers}
    needed = (_reached(moved, facts) & fixed) | set(moved)
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in buffers))
    for node in reversed(moved):
        graph.erase_node(node)
    return StatePart(tuple(buffers), tuple(given), part, carried=False)


def _fixed(graph: fx.Graph, facts: Facts) -> set[fx.Node]:
    """Code that depends on nothing that a step is given, and that nothing changes."""
    changed = {memory for changes in facts.changes.values() for memory in changes}
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        plain = node.op in ("call_function", "call_method", "get_attr")
        alone = plain and node not in facts.random and not facts.memory[node] & changed
        if alone and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    return fixed


def _final(graph: fx.Graph, node: fx.Node, reader: fx.Node, facts: Facts) -> fx.Node:
    """What the code of state takes: a tensor that is not changed any more when that code runs."""
    if not isinstance(value_of(node), Tensor):
        raise TraceError(
            f"{callee(reader)} changes a buffer by something that is no tensor "
            f"({source_of(reader)})",
            legal="tensors that a buffer is changed by",
        )
    later = False
    for other in graph.nodes:
        later |= other is reader
        if later and facts.changes.get(other, frozenset()) & facts.memory[node]:
            raise TraceError(
                f"what {callee(reader)} changes a buffer by is changed itself, afterwards "
                f"({source_of(other)})",
                legal="write the result to a new tensor: x = x + y instead of x += y",
            )
    if node.op != "placeholder":
        return node
    with graph.inserting_before(reader):
        copy = graph.call_method("clone", (node,))
    copy.meta = {**reader.meta, "example_value": value_of(node)}
    return copy


def _carry(graph: fx.Graph, buffer: fx.Node) -> StatePart:
    """Let the graph work on a copy of a buffer, whose last content is the next one."""
    first = next(node for node in graph.nodes if buffer in node.all_input_nodes)
    with graph.inserting_before(first):
        copy = graph.call_method("clone", (buffer,))
    copy.meta = {**first.meta, "example_value": value_of(buffer), OF_STATE: True}
    buffer.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    part = fx.Graph()
    part.placeholder(buffer.name)
    part.output((part.placeholder(copy.name),))
    return StatePart((buffer,), (copy,), part, carried=True)
