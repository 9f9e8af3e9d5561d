"""Chunks cut over ranks equal one device: losses, gradients, and no more communication than Megatron."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper.bodies.chunk_code import ChunkCode, ChunkInput, spec_of
from piper.bodies.cutting.joint import runner
from piper.bodies.folding import Fold
from piper.bodies.random.keyed import keyed
from piper.bodies.store import BodyStore
from piper.bodies.tensor.cut_over_ranks import Partitioned, partition
from piper.bodies.tensor.forward_code import forward_code
from piper.bodies.tensor.infer import infer_splits
from piper.errors import TraceError
from piper.frontend.traced import TracedChunk
from piper.ir.attention_forms import GATHER, AttentionForm
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split
from tests.tensor_models import (
    BATCH,
    LENGTH,
    WIDTH,
    LanguageModel,
    blocks_chunk,
    chunks_of,
    language_model_chunk,
    llama_chunk,
    loss_of,
    random_inputs,
    token_batch,
)
from tests.tensor_ranks import Ranks, part, whole_of

pytestmark = pytest.mark.xdist_group("tensor")
LAYERS = 2
SEQUENCE = Split(1)
SEPARATE: dict[str, Layout] = {
    "inputs.0.weight": Split(0), "inputs.1.weight": Split(0), "inputs.2.weight": Split(0),
    "out.weight": Split(1), "gate.weight": Split(0), "up.weight": Split(0), "down.weight": Split(1),
}  # fmt: skip
FUSED: dict[str, Layout] = {
    "inputs.0.weight": Split(0, 3), "inputs.0.bias": Split(0, 3), "out.weight": Split(1),
    "gate.weight": Split(0), "gate.bias": Split(0), "up.weight": Split(0), "up.bias": Split(0),
    "down.weight": Split(1),
}  # fmt: skip


def _compared(
    chunk: TracedChunk,
    layouts: dict[str, Layout],
    size: int,
    *,
    marks: dict[str, Split] | None = None,
    batch: dict[str, Split] | None = None,
    joined: tuple[int, ...] = (),
    attention: AttentionForm = GATHER,
    strips: int = 1,
) -> tuple[Partitioned, Counter[str]]:
    """Cuts a chunk, runs it on all ranks, and compares with one device."""
    cut = partition(
        chunk.code,
        chunk.inputs,
        layouts,
        size,
        marks=marks or {},
        batch=batch or {},
        joined=joined,
        attention=attention,
        strips=strips,
    )
    whole = random_inputs(chunk)
    leaves = {
        name: whole[name].clone().requires_grad_(given.requires_grad)
        for name, given in zip(chunk.inputs, chunk.code.inputs, strict=True)
    }
    outputs = runner(chunk.code, device="cpu")(*leaves.values())
    tangents = [torch.ones_like(out) for out in outputs]
    torch.autograd.backward(outputs, tangents)
    ranks = Ranks(cut, size)
    made = ranks.forward(
        {
            name: [part(whole[name], layouts.get(name, REPLICATED), size, r) for r in range(size)]
            for name in chunk.inputs
        }
    )
    for parts, layout, out in zip(made, cut.out_layouts, outputs, strict=True):
        _near(whole_of(parts, layout), out.detach(), "an output")
    grads = ranks.backward(
        [
            [part(tangent, layout, size, rank) for rank in range(size)]
            for tangent, layout in zip(tangents, cut.out_layouts, strict=True)
        ]
    )
    for node, name in cut.inputs.items():
        if leaves[name].grad is None:
            continue
        layout = cut.param_grads[name] if name in cut.param_grads else cut.layouts[node]
        assert layout is not None, name
        _near(whole_of(grads[node], layout), leaves[name].grad, name)
        if layout == REPLICATED:
            assert all(torch.equal(grads[node][0], other) for other in grads[node]), name
    return cut, ranks.counts


def _near(value: Tensor, expected: Any, what: str) -> None:
    assert (value - expected).norm() <= 1e-12 * expected.norm(), what


def _by_suffix(chunk: TracedChunk, suffixes: dict[str, Layout]) -> dict[str, Layout]:
    return {
        name: layout
        for name in chunk.inputs
        for suffix, layout in suffixes.items()
        if name.endswith(suffix)
    }


def _inferred(chunk: TracedChunk, size: int, **more: Any) -> dict[str, Layout]:
    asked = {"given": {}, "fixed": (), **more}
    return dict(infer_splits(chunk.code, chunk.inputs, size, **asked))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_layer_communicates_as_megatron_does(size: int, fused: bool) -> None:
    options = {"fused": True, "bias": True, "dropout": 0.3} if fused else {}
    chunk = blocks_chunk(LAYERS, **options)
    layouts = _by_suffix(chunk, FUSED if fused else SEPARATE)
    cut, counts = _compared(chunk, layouts, size)
    assert counts == {"F all_reduce": 2 * LAYERS, "B all_reduce": 2 * LAYERS}
    assert cut.notes == [] and cut.out_layouts == [REPLICATED]
    assert PARTIAL not in cut.param_grads.values()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_layer_with_its_sequence_split(size: int, fused: bool) -> None:
    options = {"fused": True, "bias": True, "dropout": 0.3} if fused else {}
    chunk = blocks_chunk(LAYERS, **options)
    x = next(name for name in chunk.inputs if name.startswith("%"))
    layouts = _by_suffix(chunk, FUSED if fused else SEPARATE) | {x: SEQUENCE}
    cut, counts = _compared(chunk, layouts, size, marks={x: SEQUENCE})
    assert counts == dict.fromkeys(
        ("F all_gather", "F reduce_scatter", "B all_gather", "B reduce_scatter"), 2 * LAYERS
    )
    assert cut.notes == [] and cut.out_layouts == [SEQUENCE]
    of_norms = [grad for name, grad in cut.param_grads.items() if "norms" in name]
    assert of_norms and set(of_norms) == {PARTIAL}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence", ["", "batch:tokens"], ids=["tp", "sp"])
@pytest.mark.parametrize("model", ["llama", "fused", "tied"])
def test_whole_models_with_inferred_splits(model: str, sequence: str, size: int) -> None:
    """Embedding, head and loss over a split vocabulary: one all_reduce for the loss, none backward."""
    chunk = {
        "llama": llama_chunk,
        "fused": lambda: language_model_chunk(fused=True, bias=True, dropout=0.2),
        "tied": lambda: language_model_chunk(tied=True, dropout=0.2),
    }[model]()
    marks = {sequence: SEQUENCE} if sequence else {}
    given = _inferred(chunk, size)
    _compared(chunk, given, size, marks=marks, joined=(0,), strips=2)
    cut, counts = _compared(chunk, given, size, marks=marks, joined=(0,))
    sums = 2 * LAYERS + 1
    if sequence:
        assert counts == {
            "F reduce_scatter": sums, "F all_gather": sums, "F all_reduce": 1, "B all_gather": sums,
            "B reduce_scatter": sums,
        }  # fmt: skip
    else:
        assert counts == {"F all_reduce": sums + 1, "B all_reduce": sums}
    assert cut.notes == [] and cut.out_layouts == [REPLICATED]


@pytest.mark.parametrize("strips", [2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_products_in_strips(strips: int, fused: bool) -> None:
    """As many bytes in so many messages. Code between gate, up and down is not joined in between."""
    options = {"fused": True, "bias": True, "dropout": 0.3} if fused else {}
    chunk = blocks_chunk(LAYERS, **options)
    x = next(name for name in chunk.inputs if name.startswith("%"))
    layouts = _by_suffix(chunk, FUSED if fused else SEPARATE) | {x: SEQUENCE}
    cut, counts = _compared(chunk, layouts, 2, marks={x: SEQUENCE}, strips=strips)
    assert counts == dict.fromkeys(
        ("F all_gather", "F reduce_scatter", "B all_gather", "B reduce_scatter"),
        2 * LAYERS * strips,
    )
    assert cut.notes == [] and cut.out_layouts == [SEQUENCE]
    nodes = [node for piece in cut.pieces for node in piece.code.graph.nodes]
    joined = [node for node in nodes if node.target is torch.ops.aten.stack.default]
    assert len(joined) == LAYERS * (
        3 if fused else 5
    )  # qkv, out and down; or q, k, v, out and down


@pytest.mark.parametrize("leaves", [("tokens",), ("tokens", "labels")])
def test_a_split_batch_gathers_keys_and_values(leaves: tuple[str, ...]) -> None:
    chunk = language_model_chunk(dropout=0.2)
    batch = {f"batch:{leaf}": SEQUENCE for leaf in leaves}
    cut, counts = _compared(chunk, {}, 2, batch=batch, joined=(0,))
    assert counts["F all_gather"] == counts["B reduce_scatter"] == 2 * LAYERS
    assert set(cut.param_grads.values()) == {PARTIAL}


def _by_heads(size: int, blocks: int = 1) -> dict[str, Any]:
    attention = AttentionForm("heads", blocks)
    return {"batch": {"batch:tokens": SEQUENCE}, "joined": (0,), "attention": attention}


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_split_batch_turns_to_heads(blocks: int) -> None:
    """There are 8 heads of queries for 4 of keys."""
    cut, counts = _compared(language_model_chunk(), {}, 2, **_by_heads(2, blocks))
    assert counts["F all_to_all"] == counts["B all_to_all"] == 4 * LAYERS
    assert counts["F all_gather"] == 0
    assert cut.notes == []


PAIRS = Split(1, 2, mirrored=True)  # an early and a late part for each rank


@pytest.mark.parametrize("sequence", [SEQUENCE, PAIRS], ids=["parts", "pairs"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_batch_goes_round_a_ring(size: int, sequence: Split) -> None:
    """With two heads of queries for each of keys."""
    given = {"batch": {"batch:tokens": sequence}, "joined": (0,)}
    cut, counts = _compared(
        language_model_chunk(), {}, size, **given, attention=AttentionForm("ring")
    )
    assert counts["F shift"] == counts["B shift back"] == (size - 1) * LAYERS
    assert counts["F all_gather"] == 0 and cut.notes == []


def test_attention_that_cannot_turn_to_heads_says_so() -> None:
    too_few, counts = _compared(language_model_chunk(), {}, 2, **_by_heads(2, blocks=4))
    assert counts["F all_gather"] == 2 * LAYERS and counts["F all_to_all"] == 0
    assert [note.reason for note in too_few.notes] == [
        "4 key heads do not divide over 4 x 2 ranks: keys and values are gathered"
    ] * LAYERS
    dropping, _ = _compared(language_model_chunk(dropout=0.2), {}, 2, **_by_heads(2))
    assert {note.operator for note in dropping.notes} == {"_safe_softmax"}


def test_pairs_are_gathered_and_dealt_as_parts_are() -> None:
    given: dict[str, Any] = {"batch": {"batch:tokens": PAIRS}, "joined": (0,)}
    _, counts = _compared(language_model_chunk(dropout=0.2), {}, 2, **given)
    assert counts["F all_gather"] == counts["B reduce_scatter"] == 2 * LAYERS
    _, counts = _compared(language_model_chunk(fused=True), {}, 2, **given)
    assert counts["F all_gather"] == counts["B reduce_scatter"] == 2 * LAYERS
    _, counts = _compared(language_model_chunk(), {}, 2, **given, attention=AttentionForm("heads"))
    assert counts["F all_to_all"] == counts["B all_to_all"] == 4 * LAYERS


def test_a_ring_of_pairs_has_half_the_scores_at_a_turn() -> None:
    """Every turn but the first, on every rank."""
    sizes = {}
    for sequence in (SEQUENCE, PAIRS):
        code = language_model_chunk()
        batch = {"batch:tokens": sequence}
        cut = partition(
            code.code, code.inputs, {}, 4, marks={}, batch=batch, joined=(0,),
            attention=AttentionForm("ring"),
        )  # fmt: skip
        turns = [BodyStore().chunk(p.code, device="cpu").by_phase for p in cut.pieces[1:4]]
        sizes[sequence] = [(turn["F"].flops, turn["B"].flops) for turn in turns]
    first, *others = zip(sizes[SEQUENCE], sizes[PAIRS], strict=True)
    assert first[0] == first[1]
    assert all(parts == (2 * pairs[0], 2 * pairs[1]) for parts, pairs in others)


def test_a_piece_is_cut_again_along_another_axis() -> None:
    """Masks are cut along both; each part is still that of one device."""
    chunk = language_model_chunk(dropout=0.3)
    batch = {"batch:tokens": SEQUENCE}
    first = partition(chunk.code, chunk.inputs, {}, 2, marks={}, batch=batch, joined=(0,))
    piece = first.pieces[1]
    names = [first.inputs.get(ref.of, getattr(ref.of, "name", "$place")) for ref in piece.inputs]
    again = replace(chunk, code=piece.code, inputs=tuple(names))
    marks = {
        name: first.marks[ref.of]
        for name, ref in zip(names, piece.inputs, strict=True)
        if isinstance(ref.of, fx.Node) and ref.of in first.marks
    }
    facts = zip(names, piece.code.inputs, strict=True)
    stream = next(name for name, fact in facts if fact.spec.shape == (BATCH, LENGTH // 2, WIDTH))
    layouts = _by_suffix(again, SEPARATE) | {stream: SEQUENCE}
    cut, counts = _compared(again, layouts, 2, marks=marks)
    assert counts["F reduce_scatter"] == 2 and counts["F all_reduce"] == 0
    targets = {str(n.target) for p in cut.pieces for n in p.code.graph.nodes}
    assert "piper.keyed_mask_part.default" in targets


def test_names_are_the_same_at_any_number_of_rows() -> None:
    cuts = []
    for rows in (1, 2, 6):
        chunk = language_model_chunk(rows=rows, fused=True, bias=True)
        layouts = _inferred(chunk, 2)
        marks = {"batch:tokens": SEQUENCE}
        cuts.append(
            partition(chunk.code, chunk.inputs, layouts, 2, marks=marks, batch={}, joined=(0,))
        )
    shown = [
        ([change.name for change in cut.changes], [_words(cut, piece) for piece in cut.pieces])
        for cut in cuts
    ]
    assert shown[0] == shown[1] == shown[2]
    names = shown[0][0]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


def _words(cut: Partitioned, piece: Any) -> list[tuple[str, str]]:
    refs = [*piece.inputs, *piece.outputs]
    return [(ref.kind, getattr(ref.of, "name", "")) for ref in refs]


def test_equal_layers_have_equal_pieces() -> None:
    chunk = blocks_chunk(4)
    layouts = _by_suffix(chunk, SEPARATE)
    cut = partition(chunk.code, chunk.inputs, layouts, 2, marks={}, batch={}, joined=())
    keys = [piece.code.key for piece in cut.pieces]
    assert len(keys) >= 16 and len(set(keys)) <= 8


def test_what_is_fixed_stays_whole() -> None:
    chunk = language_model_chunk(fused=True, bias=True)
    fixed = ("head.weight", *(n for n in chunk.inputs if ".attention.inputs.0." in n))
    without = _inferred(chunk, 2, fixed=fixed)
    assert _inferred(chunk, 2)["layers.0.attention.inputs.0.weight"] == Split(0, 3)
    assert not without.keys() & {*fixed}
    assert without["layers.0.down.weight"] == Split(1)
    cut, _ = _compared(chunk, without, 2, joined=(0,))
    assert cut.notes == []


class _Unruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(
            torch.linalg.solve_triangular(torch.eye(WIDTH).to(x), self.one(x).mT, upper=True).mT
        )


def test_an_operator_without_a_rule_is_noted_and_exact() -> None:
    batch = {"x": torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    [chunk] = chunks_of(_Unruled().double, batch, lambda m, b: m(b["x"]).square().mean())
    cut, counts = _compared(chunk, {"one.weight": Split(0), "one.bias": Split(0)}, 2, joined=(0,))
    [note] = cut.notes
    assert note.operator == "linalg_solve_triangular" and "no rule" in note.reason
    assert note.source is not None and note.source.file == __file__
    assert counts == {"F all_reduce": 1}


class _SharedKey(nn.Module):
    """One key for all heads, as multi-head latent attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.heads, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        heads = self.heads(x).view(BATCH, LENGTH, 4, 4).transpose(1, 2)
        keys = self.key(x).unsqueeze(1).expand(BATCH, 4, LENGTH, 4)
        mixed = torch.cat([heads, keys], -1).tanh()[..., 2:6]
        return self.last(mixed.transpose(1, 2).flatten(2))


def test_what_is_expanded_over_heads_is_expanded_over_own_ones() -> None:
    batch = {"x": torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    [chunk] = chunks_of(_SharedKey().double, batch, lambda m, b: m(b["x"]).square().mean())
    layouts = {"heads.weight": Split(0), "heads.bias": Split(0), "last.weight": Split(1)}
    cut, counts = _compared(chunk, dict(layouts), 2, joined=(0,))
    assert counts == {"F all_reduce": 1, "B all_reduce": 2} and cut.notes == []
    local = [n for piece in cut.pieces for n in piece.code.graph.nodes if "expand" in str(n.target)]
    assert local[0].args[1] == [BATCH, 2, LENGTH, 4]


def test_autocast_becomes_casts_in_the_code() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    [chunk] = chunks_of(lambda: LanguageModel(1), token_batch(), step)
    module = forward_code(chunk.code)
    given = random_inputs(chunk)
    [expected] = runner(chunk.code, device="cpu")(*given.values())
    [made] = module(*given.values())
    assert torch.equal(made, expected)
    products = [n for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}
    layouts = _inferred(chunk, 2)
    assert layouts["layers.0.down.weight"] == Split(1)
    cut = partition(chunk.code, chunk.inputs, layouts, 2, marks={}, batch={}, joined=(0,))
    assert cut.notes == [] and None not in cut.param_grads.values()
    [loss] = Ranks(cut, 2).forward(
        {n: [part(given[n], layouts.get(n, REPLICATED), 2, r) for r in (0, 1)] for n in given}
    )
    assert abs(loss[0] - expected) < 1e-2 * expected


def _code(function: Any, *inputs: Tensor, fold: Fold | None = None) -> ChunkCode:
    """Code that calls one function."""
    graph = fx.Graph()
    holders = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    graph.output((graph.call_function(function, tuple(holders)),))
    facts = tuple(ChunkInput(spec_of(x), False, False, False) for x in inputs)
    return ChunkCode(graph, {}, facts, (spec_of(inputs[0]),), (), fold)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (_code(torch.Tensor.add_, torch.zeros(2), torch.zeros(2)), "changed in place"),
        (_code(keyed(torch.rand_like, 0), torch.tensor([7]), torch.zeros(2)), "rand_like draws"),
        (_code(torch.rand_like, torch.zeros(2)), "draws random numbers"),
        (_code(F.relu, torch.zeros(2), fold=Fold((), ())), "changes buffers"),
    ],
)  # fmt: skip
def test_refused_code(code: ChunkCode, told: str) -> None:
    with pytest.raises(TraceError, match=told) as refusal:
        forward_code(code)
    assert refusal.value.legal


def test_a_split_that_does_not_divide_is_refused() -> None:
    chunk = language_model_chunk()
    with pytest.raises(TraceError, match="does not divide as split") as refusal:
        partition(
            chunk.code, chunk.inputs, {"head.weight": Split(0)}, 5, marks={}, batch={}, joined=(0,)
        )
    assert refusal.value.legal
