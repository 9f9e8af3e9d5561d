"""In-place changes: allowed inside a chunk, refused where another chunk would see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from piper.errors import TraceError
from piper.frontend.capture.capture import Capture, source_of

_PLAIN = "write the result to a new tensor: x = x + y instead of x += y"


def refuse_mutation(
    nodes: Sequence[fx.Node], chunk_of: dict[fx.Node, int], capture: Capture
) -> None:
    """Raise if a change in place touches what another chunk made or has read.

    Whoever reads after the last change sees the final content, which is what a chunk hands on.
    """
    facts = capture.facts
    changes = [node for node in nodes if facts.changes.get(node)]
    if not changes:
        return
    position = {node: index for index, node in enumerate(nodes)}
    home: dict[int, int] = {}  # memory -> the chunk that made it
    reached: dict[int, list[fx.Node]] = defaultdict(list)  # memory -> nodes that touch it
    for node in chunk_of:
        for memory in facts.memory[node]:
            home.setdefault(memory, chunk_of[node])
        for touched in (node, *node.all_input_nodes):
            for memory in facts.memory[touched]:
                reached[memory].append(node)
    for node in changes:
        for memory in facts.changes[node]:
            if node not in chunk_of:  # code that every reader has for itself
                continue
            early = any(
                chunk_of[other] != home[memory] and position[other] < position[node]
                for other in reached[memory]
            )
            if chunk_of[node] != home[memory] or early:
                raise TraceError(
                    "a tensor is changed in place that other regions made or have read "
                    f"({source_of(node)})",
                    legal=_PLAIN,
                )
