"""again_cuts: a complete logical graph in; where chunks are cut so that layers run again, out.

A layer that communicates cannot run again inside of one backward. Its pieces do, and the communication
between them: that of tensors which are cut, and the exchange of rows with sharded experts.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from piper.ir.graph import Graph
from piper.ir.nodes import Chunk


class AgainCuts(NamedTuple):
    """The chunks that may be cut; and the groups of chunks whose layers run again. A layer of a group of
    several chunks may have pieces in each of them."""

    calls: tuple[int, ...] = ()
    layers: tuple[tuple[int, ...], ...] = ()


def again_cuts(logical: Graph, stages: str, *, tensors: bool) -> AgainCuts:
    """Where `tensors` are cut, chunks may be, around checkpointed calls and around layers; elsewhere
    only in stages that run sharded experts again. These stay whole themselves."""
    first: dict[int, Chunk] = {}  # chunk number -> its forward in the first microbatch
    for node in logical.chunks:
        if node.phase == "F":
            first.setdefault(node.chunk, node)
    sharded = {number for number, node in first.items() if _is_sharded(node)}
    if not tensors and not sharded:
        return AgainCuts()
    groups = [
        group
        for group in _stretches(logical, first, stages)
        if tensors or not sharded.isdisjoint(group)
    ]
    together = {number for group in groups for number in group}
    calls = (set(first) if tensors else together) - sharded
    return AgainCuts(tuple(sorted(calls)), tuple(groups))


def _is_sharded(node: Chunk) -> bool:
    return any(owner.shares == "experts" for owner in node.owners)


def _stretches(logical: Graph, chunks: dict[int, Chunk], stages: str) -> list[tuple[int, ...]]:
    """Chunks of one stage of which nothing is kept, as far as no other chunk lies between them: their
    backwards would wait for that one's, and what runs again for them would not."""
    found: list[tuple[int, ...]] = []
    by_stage: dict[int | None, set[int]] = defaultdict(set)
    for number, node in chunks.items():
        if node.again == "nothing":
            by_stage[node.tag(stages)].add(number)
    sources = {number: _sources(logical, node) for number, node in chunks.items()}
    for members in by_stage.values():
        stretch: list[int] = []
        behind: set[int] = set()  # other chunks that wait for the stretch
        for number in sorted(chunks):
            waits = sources[number]
            if number not in members:
                if not waits.isdisjoint({*stretch, *behind}):
                    behind.add(number)
                continue
            if not waits.isdisjoint(behind):
                found.append(tuple(stretch))
                stretch, behind = [], set()
            stretch.append(number)
        found.append(tuple(stretch))
    return found


def _sources(logical: Graph, node: Chunk) -> set[int]:
    """The chunks whose results a forward reads."""
    names = (maker for value in node.inputs for maker in logical.producers.get(value, ()))
    makers = (logical.nodes[name] for name in names)
    return {maker.chunk for maker in makers if isinstance(maker, Chunk)}
