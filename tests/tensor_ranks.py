"""All ranks of one tensor axis in one process: pieces as bodies, communication as sums and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from piper.bodies.store import BodyStore, load
from piper.bodies.tensor.changes import PLACE, Change, Partitioned, Ref
from piper.bodies.tensor.parts import dim_of
from piper.ir.layouts import PARTIAL, Layout, Split, block_sizes, conversion, dual

Parts = list[Tensor]  # one per rank


def part(whole: Tensor, layout: Layout, size: int, rank: int) -> Tensor:
    """What a rank has; of a partial sum the first one has all."""
    if layout == PARTIAL:
        return whole.clone() if rank == 0 else torch.zeros_like(whole)
    if not isinstance(layout, Split):
        return whole.clone()
    dim = dim_of(layout)
    blocks = whole.split(block_sizes(layout, whole.shape[dim]), dim)
    chosen = (
        block.chunk(size, dim)[_dealt(layout, number, size, rank)]
        for number, block in enumerate(blocks)
    )
    return torch.cat(list(chosen), dim).contiguous()


def _dealt(layout: Split, block: int, size: int, rank: int) -> int:
    """Which part of a block a rank has; and which rank has a part."""
    return size - 1 - rank if layout.mirrored and block % 2 else rank


def whole_of(parts: Parts, layout: Layout) -> Tensor:
    if layout == PARTIAL:
        return torch.stack(parts).sum(0, dtype=parts[0].dtype)
    if not isinstance(layout, Split):
        return parts[0]
    size, dim = len(parts), dim_of(layout)
    sizes = [n // size for n in block_sizes(layout, parts[0].shape[dim] * size)]
    cut = [each.split(sizes, dim) for each in parts]
    return torch.cat(
        [cut[_dealt(layout, b, size, r)][b] for b in range(len(sizes)) for r in range(size)], dim
    )


class Ranks:
    """Runs pieces forward and backward on all ranks; `counts` has the communication by phase."""

    def __init__(self, cut: Partitioned, size: int) -> None:
        self.cut, self.size = cut, size
        self.store = BodyStore()
        self.bodies = [self.store.chunk(piece.code, device="cpu") for piece in cut.pieces]
        self.counts: Counter[str] = Counter()

    def forward(self, inputs: Mapping[str, Parts]) -> list[Parts]:
        values: dict[Ref, Parts] = {
            Ref("node", node): inputs[name] for node, name in self.cut.inputs.items()
        }
        values[PLACE] = [torch.tensor([rank]) for rank in range(self.size)]
        self.tables = []
        self._change(values)
        for piece, bodies in zip(self.cut.pieces, self.bodies, strict=True):
            body = bodies.by_phase["F"]
            run = load(self.store.texts[body.hash])
            given = [values[ref] for ref in piece.inputs]
            results = _transposed(
                run([given[ref.index][rank] for ref in body.inputs]) for rank in range(self.size)
            )
            values.update(zip(piece.outputs, results, strict=False))
            made = len(piece.outputs)
            self.tables.append({"input": given, "output": results[:made], "saved": results[made:]})
            self._change(values)
        return [values[ref] for ref in self.cut.outputs]

    def _change(self, values: dict[Ref, Parts]) -> None:
        for change in self.cut.changes:
            ref = Ref("change", change)
            if ref not in values and _made(change) in values:
                kind = conversion(*_ways(change))
                values[ref] = self._communicate("F", kind, values[_made(change)])

    def _communicate(self, phase: str, kind: str, values: Parts) -> Parts:
        if kind not in ("", "own_part"):
            self.counts[f"{phase} {kind}"] += 1
        if kind == "all_reduce":
            return [torch.stack(values).sum(0) for _ in values]
        if kind == "all_gather":
            return [torch.stack(values) for _ in values]
        if kind == "reduce_scatter":
            return list(torch.stack(values).sum(0))
        if kind == "all_to_all":
            return list(torch.stack(values, 1))
        if kind.startswith("shift"):
            step = -1 if kind == "shift" else 1
            return [values[(rank + step) % self.size] for rank in range(self.size)]
        if kind == "own_part":
            return [value[rank] for rank, value in enumerate(values)]
        return values

    def backward(self, tangents: Sequence[Parts | None]) -> dict[fx.Node, Parts]:
        """Gradients of the chunk's inputs from those of its outputs."""
        grads: dict[Ref, Parts] = {}

        def add(ref: Ref, grad: Parts) -> None:
            known = grads.get(ref)
            grads[ref] = [a + b for a, b in zip(known, grad, strict=True)] if known else grad

        for ref, tangent in zip(self.cut.outputs, tangents, strict=True):
            if tangent is not None:
                add(ref, tangent)
        undone: set[Change] = set()

        def undo(made: set[Ref]) -> None:
            for change in reversed(self.cut.changes):
                ref = Ref("change", change)
                if ref in grads and change not in undone and _root(change) in made:
                    undone.add(change)
                    made_as, read_as = _ways(change)
                    kind = conversion(dual(read_as), dual(made_as))
                    kind = "shift back" if kind == "shift" else kind
                    add(_made(change), self._communicate("B", kind, grads[ref]))

        for piece, bodies, table in reversed(
            list(zip(self.cut.pieces, self.bodies, self.tables, strict=True))
        ):
            undo(set(piece.outputs))
            if "B" not in bodies.by_phase:
                continue
            body = bodies.by_phase["B"]
            of_outputs = {
                index: grads.get(piece.outputs[index], list(map(torch.zeros_like, made)))
                for index, made in enumerate(table["output"])
            }
            given = {**table, "tangent": of_outputs}
            run = load(self.store.texts[body.hash])
            results = _transposed(
                run([given[ref.kind][ref.index][rank] for ref in body.inputs])
                for rank in range(self.size)
            )
            for ref, grad in zip(body.outputs, results, strict=True):
                add(piece.inputs[ref.index], grad)
        undo({Ref("node", node) for node in self.cut.inputs})
        return {
            node: grads[Ref("node", node)] for node in self.cut.inputs if Ref("node", node) in grads
        }


def _root(change: Change) -> Ref:
    """What was made, of which a ring has passed the Value on."""
    return _root(change.previous) if change.previous else _made(change)


def _made(change: Change) -> Ref:
    if change.previous is not None:
        return Ref("change", change.previous)
    return Ref("send", change) if change.sends else Ref("node", change.source)


def _ways(change: Change) -> tuple[Layout, Layout]:
    """How the tensor lies that is communicated, and how what arrives does."""
    return (change.sent, change.read) if change.sends else (change.have, change.want)


def _transposed(results: object) -> list[Parts]:
    """Per result, that of each rank."""
    return [list(each) for each in zip(*results, strict=True)]  # type: ignore[call-overload]
