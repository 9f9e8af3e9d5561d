"""Chunks and a size for some of them in, finer chunks at the boundaries of modules out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from piper.frontend.capture.capture import Capture, value_of
from piper.frontend.cut.layer_starts import call_starts, layer_starts
from piper.frontend.cut.units import Unit, Units, inseparable


@dataclass(frozen=True)
class Refined:
    """The chunk of each node; per chunk the one that it is a piece of, and the layer that it belongs to,
    where layers have several chunks."""

    chunk_of: dict[fx.Node, int]
    whole: tuple[int, ...]
    layer: tuple[int, ...]


def cut_pieces(
    capture: Capture,
    chunk_of: dict[fx.Node, int],
    sizes: Mapping[int, int],
    counts: Iterable[tuple[int, int]] = (),
    calls: Collection[int] = (),
    layers: Iterable[tuple[int, ...]] = (),
) -> Refined:
    """Cut the chunks in `sizes` so that each piece reads at most so many bytes of parameters, the first
    of each pair of `counts` behind the counts that the second reads, those of `calls` around
    checkpointed calls, and around the layers that each group of `layers` runs through.

    A module that is larger is opened; one that cannot be opened has a piece of its own. Pieces hold
    neighbours of one parent, so that equal layers are cut equally and go on sharing their bodies.
    Numbered by (chunk, piece), finer chunks stand in a topological order as well.
    """
    members: dict[int, list[fx.Node]] = {}
    for node, chunk in chunk_of.items():
        members.setdefault(chunk, []).append(node)
    begins = _begins_of_layers(members, layers)
    shared = {chunk: group for group in layers if len(group) > 1 for chunk in group}
    number: dict[fx.Node, int] = {}
    whole: list[int] = []
    layer: list[int] = []
    layer_in: dict[tuple[int, ...], int] = {}  # group -> the number of its last layer
    for chunk in sorted(members):
        nodes = members[chunk]
        starts = _starts(capture, nodes, sizes[chunk]) if chunk in sizes else {0}
        for reader in (reader for source, reader in counts if source == chunk):
            starts |= _behind_counts(capture, nodes, set(members[reader]))
        if chunk in calls:
            again = (call_starts(nodes) | begins[chunk]) - {0}
            starts |= again - inseparable(nodes, capture) if again else set()
        group = shared.get(chunk)
        for position, node in enumerate(nodes):
            if position in starts:
                whole.append(chunk)
                if group is not None and position in begins[chunk]:
                    layer_in[group] = len(whole) - 1
                layer.append(-1 if group is None else layer_in[group])
            number[node] = len(whole) - 1
    return Refined({node: number[node] for node in chunk_of}, tuple(whole), tuple(layer))


def _starts(capture: Capture, nodes: Sequence[fx.Node], size: int) -> set[int]:
    """Where the pieces of one chunk begin."""
    packing = _Packing(capture, nodes, size)
    found = {piece.start for piece in packing.pieces(packing.units.whole)}
    return (found - inseparable(nodes, capture)) | {0}


def _begins_of_layers(
    members: Mapping[int, list[fx.Node]], groups: Iterable[tuple[int, ...]]
) -> dict[int, set[int]]:
    """Per chunk, the positions where a layer begins, of those that each group of chunks runs through
    together. A group begins with one."""
    begins: dict[int, set[int]] = defaultdict(set)
    for group in groups:
        starts = layer_starts([node for chunk in group for node in members[chunk]])
        offset = 0
        for chunk in group:
            size = len(members[chunk])
            begins[chunk] = {start - offset for start in starts if 0 <= start - offset < size}
            offset += size
        begins[group[0]].add(0)
    return begins


def _behind_counts(capture: Capture, nodes: Sequence[fx.Node], reader: set[fx.Node]) -> set[int]:
    """Where a chunk that makes counts and rows for a reader has all that the counts need, if the rows
    come later."""
    read = [i for i, node in enumerate(nodes) if not reader.isdisjoint(node.users)]
    counts = [i for i in read if _are_counts(value_of(nodes[i]))]
    if not counts or counts[0] == read[-1]:
        return set()
    return {counts[0] + 1} - inseparable(nodes, capture)


def _are_counts(value: Any) -> bool:
    integers = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype in integers


@dataclass(frozen=True)
class _Piece:
    start: int
    stop: int
    params: frozenset[fx.Node]
    open: bool = False  # whether a neighbour may still join


class _Packing:
    def __init__(self, capture: Capture, nodes: Sequence[fx.Node], size: int) -> None:
        self.units = Units(nodes)
        self.size = size
        self.params = [
            frozenset(
                arg
                for arg in node.all_input_nodes
                if arg in capture.origins and capture.origins[arg].role == "param"
            )
            for node in nodes
        ]

    def pieces(self, unit: Unit) -> list[_Piece]:
        made = self._piece(unit)
        inner = self.units.open(unit) if self._bytes(made.params) > self.size else []
        if not inner:
            return [made]
        found: list[_Piece] = []
        for child in inner:
            parts = self.pieces(child)
            # Only whole children join each other: those that were opened differ in level.
            parts = [replace(piece, open=len(parts) == 1) for piece in parts]
            for piece in parts:
                if found and self._fits(found[-1], piece):
                    before = found.pop()
                    params = before.params | piece.params
                    piece = _Piece(before.start, piece.stop, params, before.open and piece.open)
                found.append(piece)
        return found

    def _fits(self, before: _Piece, piece: _Piece) -> bool:
        """Code without parameters goes with its neighbour, as a parent's own code does."""
        if not before.params or not piece.params:
            return True
        together = self._bytes(before.params | piece.params)
        return before.open and piece.open and together <= self.size

    def _piece(self, unit: Unit) -> _Piece:
        nothing: frozenset[fx.Node] = frozenset()
        params = nothing.union(*self.params[unit.start : unit.stop])
        return _Piece(unit.start, unit.stop, params)

    def _bytes(self, params: frozenset[fx.Node]) -> int:
        values = [value_of(param) for param in params]
        return sum(value.numel() * value.element_size() for value in values)
