"""Pieces of a chunk: an analysis in; nodes between the same changes of layout, as code, out.

A node's level is the most changes of layout on any way to it. Nodes of one level are a piece: all ways
between two of them stay inside.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from piper.bodies.tensor.analysis import Analysis
from piper.bodies.tensor.changes import Change, Piece, Ref
from piper.bodies.tensor.piece_code import PieceCode


def pieces_of(analysis: Analysis, module: fx.GraphModule) -> list[Piece]:
    nodes: dict[int, list[fx.Node]] = defaultdict(list)
    for node in analysis.graph.nodes:
        elsewhere = any(
            node in these for these in (analysis.free, analysis.weights, analysis.unread)
        )
        if node.op in ("call_function", "get_attr") and not elsewhere:
            nodes[analysis.levels[node]].append(node)
    level_of = {node: level for level, own in nodes.items() for node in own}
    outputs: dict[int, dict[Ref, None]] = defaultdict(dict)
    for ref in _handed_on(analysis, level_of):
        source = ref.of.source if isinstance(ref.of, Change) else ref.of
        outputs[level_of.get(source, 0)][ref] = None  # type: ignore[arg-type]
    found = []
    for level in sorted(nodes.keys() | outputs.keys()):
        code = PieceCode(analysis, module, nodes[level])
        found.append(code.piece(list(outputs[level])))
    return found


def _handed_on(analysis: Analysis, level_of: dict[fx.Node, int]) -> list[Ref]:
    """What a piece makes for others, in the order of the code; the first one sends inputs."""
    refs: dict[Ref, None] = {}
    for node, level in level_of.items():
        for reading in analysis.readings.get(node, ()):
            of = reading.ref.of
            if isinstance(of, fx.Node) and level_of.get(of, level) != level:
                refs[reading.ref] = None
    for change in analysis.changes.values():
        if change.sends:
            refs[Ref("send", change)] = None
        elif change.source in level_of:
            refs[Ref("node", change.source)] = None
    for ref in analysis.outputs:
        if ref.kind == "node":
            refs[ref] = None
    order = {node: number for number, node in enumerate(analysis.graph.nodes)}

    def place(ref: Ref) -> tuple[bool, int]:
        sent = isinstance(ref.of, Change)
        return sent, order[ref.of.source if isinstance(ref.of, Change) else ref.of]

    return sorted(refs, key=place)
