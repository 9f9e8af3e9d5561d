"""The cut of a chunk over ranks: its code and layouts of its inputs in, pieces with changes between out.

Only the forward is cut. AOTAutograd differentiates every piece by itself, and the backward of a change
of layout is its transpose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from piper.bodies.chunk_code import ChunkCode
from piper.bodies.tensor.analysis import Analysis
from piper.bodies.tensor.changes import Change as Change
from piper.bodies.tensor.changes import Ends, Partitioned
from piper.bodies.tensor.changes import Note as Note
from piper.bodies.tensor.changes import Piece as Piece
from piper.bodies.tensor.changes import Ref as Ref
from piper.bodies.tensor.forward_code import forward_code
from piper.bodies.tensor.pieces import pieces_of
from piper.bodies.tensor.rules.expert_rows import biases_last
from piper.bodies.tensor.sequence_marks import carried_marks
from piper.bodies.tensor.stand_ins import with_stand_ins
from piper.errors import TraceError
from piper.ir.attention_forms import GATHER, AttentionForm
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides

NO_ENDS = Ends()


def partition(
    code: ChunkCode,
    names: Sequence[str],
    layouts: Mapping[str, Layout],
    size: int,
    *,
    marks: Mapping[str, Split],
    batch: Mapping[str, Split],
    joined: Collection[int],
    attention: AttentionForm = GATHER,
    ends: Ends = NO_ENDS,
    sorts_apart: bool = False,
    strips: int = 1,
) -> Partitioned:
    """`names` and `layouts` are of the inputs, over `size` ranks.

    Leaves in `batch` are replicated, and each rank takes its part of them. Partial sums become splits
    along what the dims in `marks` carry to. Outputs numbered in `joined` end replicated. Attention over
    parts of a sequence takes the form that is said, where it can. Some outputs have other `ends`. Where
    the choice of experts is split, each rank may sort its own rows (`sorts_apart`). Products compute
    their tokens in so many `strips`.
    """
    module = forward_code(code)
    carried = prepared(module.graph, names, layouts, size, marks=marks, batch=batch, joined=joined)
    analysis = Analysis(
        module.graph, code, names, layouts, size, carried, attention, ends, sorts_apart, strips
    )
    analysis.run()
    pieces = _with_wanted_tangents(pieces_of(analysis, module), analysis.outputs, code.tangents)
    crossing = {
        ref.of.source if isinstance(ref.of, Change) else ref.of
        for piece in pieces
        for ref in (*piece.inputs, *piece.outputs)
        if ref.of is not None
    } | set(analysis.inputs)
    return Partitioned(
        pieces=pieces,
        changes=list(analysis.changes.values()),
        inputs=analysis.inputs,
        layouts={node: analysis.layout(node) for node in crossing},
        flows={node: analysis.flows(node) for node in crossing},
        outputs=analysis.outputs,
        out_layouts=analysis.out_layouts,
        marks=analysis.marks,
        param_grads={analysis.inputs[node]: _gradient(analysis, node) for node in analysis.readers},
        notes=analysis.notes,
    )


def _with_wanted_tangents(
    pieces: list[Piece], outputs: Sequence[Ref], tangents: Collection[int]
) -> list[Piece]:
    """Pieces that expect gradients of what somebody gives one for: others may read what a gradient
    passes, but in code that none leaves."""
    wanted: set[Ref] = set()

    def want(ref: Ref) -> None:
        if ref in wanted:
            return
        wanted.add(ref)
        if isinstance(ref.of, Change) and ref.kind == "change":
            if ref.of.previous is not None:
                want(Ref("change", ref.of.previous))
            want(Ref("send", ref.of) if ref.of.sends else Ref("node", ref.of.source))

    for index in tangents:
        want(outputs[index])
    found = []
    for piece in reversed(pieces):
        code = piece.code
        kept = tuple(index for index in code.tangents if piece.outputs[index] in wanted)
        if kept:
            for ref, taken in zip(piece.inputs, code.inputs, strict=True):
                if taken.grad:
                    want(ref)
        found.append(Piece(replace(code, tangents=kept), piece.inputs, piece.outputs))
    return found[::-1]


def prepared(
    graph: fx.Graph,
    names: Sequence[str],
    layouts: Mapping[str, Layout],
    size: int,
    *,
    marks: Mapping[str, Split],
    batch: Mapping[str, Split],
    joined: Collection[int],
) -> dict[fx.Node, Split]:
    """Cuts leaves and joins results in a forward; returns where the sequence is."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    named = dict(zip(names, holders, strict=True))
    for name, node in named.items():
        for layout in (layouts.get(name), batch.get(name)):
            shape = node.meta["val"].shape
            if not isinstance(layout, Split) or layout.dim is None:
                continue
            if not divides(layout, shape, size):
                raise TraceError(
                    f"{name} {list(shape)} does not divide as {layout} over {size} ranks",
                    legal=f"a dim, and blocks, that {size} divides",
                )
    cut = {named[name]: split for name, split in batch.items() if name in named}
    with_stand_ins(graph, batch=cut, joined=tuple(joined))
    biases_last(graph)
    start = {
        named[name]: split for name, split in (*batch.items(), *marks.items()) if name in named
    }
    return carried_marks(graph, start, size)


def _gradient(analysis: Analysis, node: fx.Node) -> Layout | None:
    """How a parameter's gradient lies."""
    layout, readers = analysis.layout(node), analysis.readers[node] - {None}
    if isinstance(layout, Split):
        return layout
    if not analysis.flows(node) or readers in (set(), {False}):
        return REPLICATED
    return PARTIAL if readers == {True} else None
