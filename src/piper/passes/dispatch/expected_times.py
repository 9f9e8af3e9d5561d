"""Expected times: what list scheduling took a step to be in, its Timeline out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.cost.estimate import task_kind
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Comm, Node
from piper.mesh import Slice
from piper.observe.timeline import Label, Timeline, Track
from piper.passes.dispatch.list_schedule import Ordered


def expected_timeline(ordered: Ordered, directives: Sequence[str]) -> Timeline:
    """A track per slice, a span per node. Each node takes what it takes alone; gathers of parameters for
    each use come later, in `pace`."""
    graph = ordered.graph
    spans: dict[Slice, list[tuple[Node, float, float]]] = {}
    for node, (start, end) in zip(graph.nodes.values(), ordered.times, strict=True):
        spans.setdefault(node.slice or Slice(), []).append((node, start, end))
    tracks = []
    for at, found in sorted(spans.items()):
        labels = tuple(_label(graph, node) for node, _, _ in found)
        track = Track(str(at), tuple(graph.mesh.ranks(at)), labels, begins=[0])
        for which, (_, start, end) in enumerate(found):
            track.add(which, start, start, end)
        tracks.append(track)
    step = 0.0, max((end for _, end in ordered.times), default=0.0)
    return Timeline("simulated", tracks, [step], tuple(directives))


def _label(graph: Graph, node: Node) -> Label:
    stream, tags, origin = node.stream, node.tags, node.origin
    if not isinstance(node, Comm):
        phase = node.phase if isinstance(node, Chunk) else ""
        return Label(node.name, task_kind(node), stream, phase, tags, origin)
    kind = communication(node.comm)
    moved = node.inputs if kind.brings else node.outputs
    return Label(
        node.name,
        node.comm,
        stream,
        tags=tags,
        origin=origin,
        nbytes=sum(graph.values[name].nbytes for name in moved),
        meeting=node.key,
        receives=kind.receives,
    )
