"""In-place changes: allowed inside a chunk, refused where another chunk would see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from torch import fx

from piper.errors import TraceError
from piper.frontend.capture import Capture, source_of

_PLAIN = "write the result to a new tensor: x = x + y instead of x += y"
_STATE = "no state that forward changes: LayerNorm or GroupNorm for BatchNorm, or model.eval()"


def refuse_mutation(
    nodes: Sequence[fx.Node], chunk_of: dict[fx.Node, int], capture: Capture
) -> None:
    """Raise if a change in place touches what is given, or what another chunk made or has read.

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
    given = {m: node for node in capture.origins for m in facts.memory[node]}
    for node in changes:
        for memory in facts.changes[node]:
            if memory in given:
                origin = capture.origins[given[memory]]
                _refuse(node, f"{origin.role} {origin.name} is changed in place", _STATE)
            if node not in chunk_of:  # code that every reader has for itself
                continue
            early = any(
                chunk_of[other] != home[memory] and position[other] < position[node]
                for other in reached[memory]
            )
            if chunk_of[node] != home[memory] or early:
                _refuse(node, "a tensor is changed in place that other regions made or have read")


def _refuse(node: fx.Node, what: str, legal: str = _PLAIN) -> NoReturn:
    raise TraceError(f"{what} ({source_of(node)})", legal=legal)
