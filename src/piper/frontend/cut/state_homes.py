"""Homes of state: a program in chunks in; which chunk leaves what each part of the state takes, out."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from torch import fx

from piper.bodies.captured_nodes import source_of
from piper.errors import TraceError
from piper.frontend.capture.capture import Capture
from piper.frontend.capture.state_parts import StatePart
from piper.frontend.cut.regions import module_paths


def state_homes(capture: Capture, chunk_of: Mapping[fx.Node, int]) -> dict[int, list[StatePart]]:
    """Chunk -> the parts of the state that it leaves something for. What takes nothing, such as a
    counter, belongs where its module's code is."""
    homes: dict[int, list[StatePart]] = {}
    for part in capture.state:
        chunks = {chunk_of[node] for node in part.given if node in chunk_of}
        if len(chunks) > 1 or any(node not in chunk_of for node in part.given):
            names = ", ".join(capture.origins[node].name for node in part.buffers)
            line = source_of(part.given[0])
            raise TraceError(
                f"buffer {names} is changed by what several regions make ({line})",
                legal="state that one region changes",
            )
        home = chunks.pop() if chunks else _of_module(capture, part, chunk_of)
        homes.setdefault(home, []).append(part)
    return homes


def _of_module(capture: Capture, part: StatePart, chunk_of: Mapping[fx.Node, int]) -> int:
    """The last chunk with code of the module that has the buffers, or else of the one around it."""
    path = unquote(capture.origins[part.buffers[0]].name).rpartition(".")[0]
    while path:
        inside = [chunk for node, chunk in chunk_of.items() if path in module_paths(node)]
        if inside:
            return max(inside)
        path = path.rpartition(".")[0]
    return 0
