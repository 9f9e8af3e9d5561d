"""Units: a stretch of captured code in, the modules that it runs through out; where no cut may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, fx

from piper.frontend.capture.capture import Capture, value_of
from piper.frontend.cut.regions import module_paths


@dataclass(frozen=True)
class Unit:
    """Neighbouring nodes `start <= i < stop` that run inside one module, `depth` levels below the model.

    What the surrounding code does next to the module is part of it.
    """

    path: str
    start: int
    stop: int
    depth: int


class Units:
    """The modules that a sequence of nodes runs through, opened one at a time."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.levels = [module_levels(node) for node in nodes]

    @property
    def whole(self) -> Unit:
        return Unit("", 0, len(self.levels), 0)

    def leaves(self) -> list[Unit]:
        """The smallest units, which together are all of it."""
        opened, found = [self.whole], []
        while opened:
            unit = opened.pop()
            inner = self.open(unit)
            opened += reversed(inner)
            if not inner:
                found.append(unit)
        return found

    def open(self, unit: Unit) -> list[Unit]:
        """The calls inside a unit, which together are all of it; none if it calls no module.

        Code that lies in no child stays with the child before it, at the start with the one after.
        """
        starts: list[tuple[int, str]] = []
        for position in range(unit.start, unit.stop):
            levels = self.levels[position]
            if len(levels) > unit.depth:
                path = levels[unit.depth]
                if not starts or starts[-1][1] != path:
                    starts.append((position, path))
        if not starts:
            return []
        starts[0] = (unit.start, starts[0][1])
        ends = [start for start, _ in starts[1:]] + [unit.stop]
        return [
            Unit(path, start, stop, unit.depth + 1)
            for (start, path), stop in zip(starts, ends, strict=True)
        ]


def module_levels(node: fx.Node) -> tuple[str, ...]:
    """The modules around a node, outer ones first; containers that are never called count too."""
    paths = [path for path in module_paths(node) if path]
    found: list[str] = []
    for outer, inner in pairwise(("", *paths)):
        start = len(outer) + 1 if outer and inner.startswith(f"{outer}.") else 0
        if outer and not start:  # a module that belongs elsewhere
            found.append(inner)
            continue
        ends = [i for i in range(start, len(inner)) if inner[i] == "."]
        found += [inner[:end] for end in (*ends, len(inner))]
    return tuple(found)


def inseparable(nodes: Sequence[fx.Node], capture: Capture) -> set[int]:
    """Positions before which no cut may fall: inside a tuple, or while memory is being changed.

    Whoever reads after the last change sees the final content, so readers may be cut off.
    """
    position = {node: index for index, node in enumerate(nodes)}
    spans: list[tuple[int, int]] = []
    for node, start in position.items():
        if not isinstance(value_of(node), Tensor):
            spans.append(
                (start, max((position.get(user, start) for user in node.users), default=start))
            )
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node, index in position.items():
        for touched in (node, *node.all_input_nodes):
            for memory in capture.facts.memory[touched]:
                first.setdefault(memory, index)
        for memory in capture.facts.changes.get(node, ()):
            last[memory] = index
    spans += [(first[memory], end) for memory, end in last.items()]
    return {index for start, end in spans for index in range(start + 1, end + 1)}


def crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Per position, the bytes of all tensors that are made before it and read from there on."""
    position = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node, made in position.items():
        value = value_of(node)
        last = max((position.get(user, made) for user in node.users), default=made)
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            change[made + 1] += size
            change[last + 1] -= size
    return list(accumulate(change))
