"""Layouts: the table of changes, what a rank has of a Value, and who makes communication."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import piper
from piper import Schedule, where
from piper.errors import PlanError
from piper.ir.layouts import (
    PARTIAL,
    REPLICATED,
    SHARED,
    STACKED,
    Layout,
    Routed,
    Split,
    conversion,
    dual,
    layouts_from_text,
    layouts_text,
    local,
)
from piper.ir.tensor_type import TensorType
from piper.mesh import Mesh
from piper.strategies import parallel
from tests.zoo import program_of

# made -> read: forward, backward.
TABLE: list[tuple[Layout, Layout, str, str]] = [
    (PARTIAL, REPLICATED, "all_reduce", ""),
    (REPLICATED, SHARED, "", "all_reduce"),
    (PARTIAL, Split(0), "reduce_scatter", "all_gather"),
    (Split(1), SHARED, "all_gather", "reduce_scatter"),
    (Split(0), REPLICATED, "all_gather", "own_part"),
    (REPLICATED, Split(2), "own_part", "all_gather"),
    (Split(0), Split(1), "all_to_all", "all_to_all"),
    (Split(0), Split(0, turn=1), "shift", "shift"),
    (Split(0, 2, 1), Split(0, 2, 2), "shift", "shift"),
    (PARTIAL, SHARED, "all_reduce", "all_reduce"),
    (Split(0), Routed("counts"), "all_to_all", "all_to_all"),
    (STACKED, Routed("counts"), "all_to_all", "all_to_all"),
]


@pytest.mark.parametrize(("made", "read", "forward", "backward"), TABLE)
def test_a_change_fixes_its_transpose(
    made: Layout, read: Layout, forward: str, backward: str
) -> None:
    assert conversion(made, read) == forward
    assert conversion(dual(read), dual(made)) == backward


def test_what_no_communication_does_is_refused() -> None:
    every = [
        REPLICATED,
        SHARED,
        PARTIAL,
        STACKED,
        Split(0),
        Split(0, 2),
        Split(1),
        Routed("a"),
        Routed("b"),
    ]
    refused = set()
    for made, read in product(every, every):
        try:
            change = conversion(made, read)
        except PlanError as error:
            assert "nothing turns" in str(error)
            refused.add((made, read))
        else:
            free = made == read or (made, read) == (REPLICATED, SHARED)
            assert (change == "") == free, (made, read)
    assert (Routed("a"), Routed("b")) in refused, "rows of other counts lie elsewhere"
    for wrong in (Split(0, turn=2), Split(1, turn=1)):
        with pytest.raises(PlanError, match="nothing turns"):
            conversion(Split(0), wrong)
    assert (STACKED, Split(0)) in refused and (Split(0), PARTIAL) in refused
    assert (Split(0), Split(0, 2)) in refused, "parts of blocks are no parts of parts"


def test_what_a_rank_has() -> None:
    mesh = Mesh((("dp", 2), ("ep", 4), ("tp", 3)))
    whole = TensorType((16, 9, 5), "float32")
    layouts = (("dp", Split(0)), ("ep", Split(0)), ("tp", Split(1)))
    assert local(whole, layouts, mesh) == TensorType((2, 3, 5), "float32")
    rows = local(whole, (("dp", Split(0)), ("ep", Routed("c"))), mesh)
    assert rows == TensorType((2, 9, 5), "float32", bound=8), "all rows of a data rank may meet"
    assert local(whole, (("dp", PARTIAL), ("ep", STACKED)), mesh) == whole
    with pytest.raises(PlanError, match="does not divide over ep=4"):
        local(whole, (("ep", Split(2)),), mesh)


def test_text() -> None:
    layouts = (
        ("dp", Split(1)), ("ep", Routed("%counts[MB=0]")), ("a", STACKED), ("b", SHARED),
        ("c", Split(2, turn=1)), ("d", Split(2, (4, 8), 3)),
        ("e", Split(1, 2, mirrored=True)), ("f", Split(1, 2, 1, True)),
    )  # fmt: skip
    assert layouts_text(layouts) == (
        "dp: split(1); ep: routed(%counts[MB=0]); a: stacked; b: shared; c: split(2 turn 1); "
        "d: split(2|4+8 turn 3); e: split(1|2 mirrored); f: split(1|2 mirrored turn 1)"
    )
    assert layouts_from_text(layouts_text(layouts)) == layouts
    with pytest.raises(PlanError, match="is no layout"):
        layouts_from_text("dp: split(x)")


@pytest.mark.xdist_group("moe")
def test_types_and_layouts_are_true() -> None:
    """Of one microbatch, whole over the mesh; along each axis as it is."""
    graph = program_of("moe").apply(parallel(pp=2, dp=4, ep=2, microbatches=2)).graph
    names = {name.partition("[")[0]: name for name in graph.values}
    counts = graph.values[names["%counts"]]
    assert counts.type == TensorType((4,), "int64")
    assert layouts_text(counts.layout) == "dp: stacked; ep: stacked"
    rows = next(v for v in graph.values.values() if Routed(counts.name) in dict(v.layout).values())
    assert layouts_text(rows.layout) == f"dp: split(0); ep: routed({counts.name})"
    assert rows.shape[0] == 32, "8 samples of 4 tokens in a microbatch"
    weight = next(v for n, v in graph.values.items() if n.endswith("moe.experts.up"))
    assert layouts_text(weight.layout) == "dp: replicated; ep: split(0)"
    loss = graph.values[names[graph.loss]]
    assert layouts_text(loss.layout) == "dp: partial; ep: partial"


class Small(nn.Module):
    """No rows in what lies between its stages, though its dim 0 is as large as the batch; and another
    program for larger batches than the example's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            mean = self.first(x).mean(0)
            if x.shape[0] > 8:
                mean = mean.sin()
        with piper.annotate("PP"):
            return self.second(mean)


def test_a_program_that_cannot_be_compared_with_a_larger_one() -> None:
    batch = {"x": torch.randn(8, 8)}
    program = piper.trace(Small, batch, lambda model, batch: model(batch["x"]).sum())
    assert program.source.guessed
    assert program.graph.values["%mean"].batch == Split(0), "wrong, as long as nothing tells"
    job = program.apply(parallel(pp=2, dp=2, microbatches=2)).lower()
    sent = next(comm for comm in job.graph.comms if comm.comm == "send")
    value = job.graph.values[sent.inputs[0]]
    assert value.type == TensorType((8,), "float32") and value.batch == STACKED


def test_only_relayout_makes_communication() -> None:
    """A rule of the compiler: every Comm is a change of layout, or of slice."""
    package = Path(piper.__file__).parent
    makers = set()
    for path in package.rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        imports = [
            n for n in tree if isinstance(n, ast.ImportFrom) and n.module == "piper.ir.nodes"
        ]
        calls = [n.func for n in tree if isinstance(n, ast.Call)]
        if any(alias.name == "Comm" for n in imports for alias in n.names) and any(
            isinstance(called, ast.Name) and called.id == "Comm" for called in calls
        ):
            makers.add(path.relative_to(package).as_posix())
    assert makers == {"passes/physical/relayout.py"}


@pytest.mark.xdist_group("tied")
def test_axes_of_one_rank_say_nothing_about_how_a_parameter_is_kept() -> None:
    """Regions that share a parameter name the same axes in another order, with options of ZeRO 3."""

    def strategy(s: Schedule) -> None:
        s.mesh(ep=1, dp=1)
        s.replicate(where(PP=0), over="dp")
        s.replicate(where(PP=1), over="ep", zero=3, prefetch=2)
        s.replicate(where(PP=1), over="dp")
        s.replicate(where(PP=0), over="ep", zero=3, prefetch=2)

    job = program_of("tied").apply(strategy).lower()
    assert not job.graph.comms
