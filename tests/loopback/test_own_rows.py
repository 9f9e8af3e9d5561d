"""Rows that each rank has sorted by itself: what still communicates, who holds which experts, and which
code has them sorted together all the same, or is refused.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.errors import MeshError, PlanError, TensorError
from piper.ir.layouts import (
    PARTIAL,
    REPLICATED,
    SHARED,
    Layout,
    Routed,
    Split,
    conversion,
    layout_from_text,
    order_of,
)
from piper.plan.holdings import holdings
from piper.plan.tasks import Comm
from piper.plan.types import Plan
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.tensor_zoo import BATCH, LENGTH, WIDTH, program_of
from tests.zoo import ADAMW, EXPERTS

pytestmark = pytest.mark.xdist_group("tensor")
ROWS = BATCH * LENGTH


@cache
def _job(name: str = "mixture", **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)


def _comms(plan: Plan, stream: str) -> Counter[tuple[str, tuple[int, ...]]]:
    number = [s.name for s in plan.streams].index(stream)
    (part,) = plan.classes
    comms = (t for t in part.tasks if isinstance(t, Comm) and t.stream == number)
    return Counter((t.comm, part.slots[t.source].shape) for t in comms)


def _sorted_rows(plan: Plan) -> set[tuple[int, ...]]:
    """Shapes of what lies in an order of each rank's own."""
    (part,) = plan.classes
    return {s.shape for s in part.slots for _, way in s.cut if order_of(way)}


# Layouts


@pytest.mark.parametrize(
    "other", [REPLICATED, SHARED, PARTIAL, Split(0), Split(1), Split(0, order=2)]
)
def test_only_a_rank_itself_knows_the_order_of_its_rows(other: Layout) -> None:
    own = Split(0, order=1)
    for made, read in ((own, other), (other, own)):
        with pytest.raises(PlanError, match="nothing turns"):
            conversion(made, read)
    assert conversion(own, own) == ""
    assert conversion(own, Routed("counts")) == conversion(Routed("counts"), own) == "all_to_all"


@pytest.mark.parametrize(
    "way", [Split(0, order=3), Split(0, 4, order=1), Split(1, 2, 0, True, 12), Split(order=2)]
)
def test_orders_are_said_in_words(way: Split) -> None:
    assert layout_from_text(str(way)) == way


# Plans


def test_along_sequences_that_are_cut_nothing_is_communicated_for_experts() -> None:
    """Beside what a dense layer communicates."""
    dense, mixture = (_comms(_job(name, cp=2).plan, "tensor") for name in ("dense", "mixture"))
    assert mixture == dense
    assert (2 * ROWS // 2, WIDTH) in _sorted_rows(_job(cp=2).plan)  # two experts for each row


def test_rows_travel_to_sharded_experts_from_the_rank_that_has_them() -> None:
    plan = _job(cp=2, dp=2, ep=2).plan
    dense = _comms(_job("dense", cp=2, dp=2).plan, "tensor")
    assert _comms(plan, "tensor") == dense
    exchanged = _comms(plan, "exchange")
    assert {kind for kind, _ in exchanged} == {"all_to_all"}
    assert ("all_to_all", (2 * ROWS // 4, WIDTH)) in exchanged


def test_whole_experts_are_shared_out_over_ranks_that_cut_other_tensors() -> None:
    plan = _job(dp=2, ep=4, tp=2, sp=True, etp=1).plan
    assert dict(plan.tensors["blocks.1.mixture.up"].cut) == {"ep": Split(0), "tp": Split(0)}
    for rank in range(plan.mesh.size):
        at = plan.mesh.coordinates(rank)
        held = {h.tensor: h for h in holdings(plan, rank) if h.what == "param"}
        (experts,) = held["blocks.1.mixture.up"].part.spans[:1]
        assert experts == ((2 * at["ep"] + at["tp"], EXPERTS // 4),)
    (part,) = plan.classes
    over = {
        plan.groups[t.group].over
        for t in part.tasks
        if isinstance(t, Comm) and t.comm == "all_to_all"
    }
    assert over == {("ep", "tp")}


def test_experts_that_every_rank_holds_whole_have_sums_of_gradients_alone() -> None:
    """Of tokens nothing is gathered, as for experts that are cut, and their gradients are summed over
    all ranks that share sequences."""
    plan = _job(tp=2, sp=True, etp=1).plan
    assert not any("mixture.up" in n and t.cut for n, t in plan.tensors.items())
    bucket = next(b for b in plan.buckets if "blocks.0.mixture.up" in b.params)
    assert bucket.copies == ("tp",)
    assert not any(shape == (ROWS, WIDTH) for _, shape in _comms(plan, "tensor"))


# Code that wants rows of all ranks


class Odd(nn.Module):
    """One mixture, and one kind of code that knows more rows than a rank has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(8, 8)
        self.gate, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)

        def experts(taken: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            if self.kind == "pairs":
                taken = taken.view(-1, 2, 8).sum(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1)
            if self.kind == "turned":  # rows as columns, and back
                mixed = taken.view(-1, 2, 4).transpose(0, 1).reshape(-1, 8).softmax(1)
                taken = taken + mixed.sum(0)
            if self.kind == "looked up":
                taken = taken + F.embedding(
                    torch.tensor([3, 20, 41], device=taken.device), taken
                ).sum(0)
            if self.kind == "causal":
                keys = self.up.view(1, 1, 32, 8)
                queries = taken.view(1, 1, -1, 8)
                found = F.scaled_dot_product_attention(queries, keys, keys, is_causal=True)
                taken = taken + found.view(-1, 8)
            if self.kind == "every second":
                taken = taken + taken[::2].repeat_interleave(2, 0)
            if self.kind == "dropout":
                taken = F.dropout(taken, 0.5)
            made = piper.grouped_mm(taken, self.up, counts)
            return made * counts.max() if self.kind == "counts" else made

        if self.kind != "other counts":
            made = piper.mixture(experts, rows, chosen, weights, num_experts=4)
        else:
            first = {}

            def noting(taken: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
                first["counts"] = counts
                return piper.grouped_mm(taken, self.up, counts)

            def by_others(taken: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
                return piper.grouped_mm(taken, self.up, first["counts"])

            other = self.second(rows).softmax(-1).topk(2)
            made = piper.mixture(noting, rows, chosen, weights, num_experts=4)
            made = made + piper.mixture(by_others, rows, other[1], other[0], num_experts=4)
        penalty = self.up.square().sum() if self.kind == "penalty" else 0.0
        return made.square().mean() + 0.01 * penalty


KINDS = (
    "pairs", "turned", "looked up", "causal", "every second", "dropout", "counts", "other counts",
    "penalty",
)  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_code_that_wants_rows_of_all_ranks_has_them_sorted_together(kind: str) -> None:
    """And trains like one device, as it does where nobody wants that."""
    tokens = torch.randint(8, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens.T.contiguous()} if kind == "looked up" else {"tokens": tokens}
    program = piper.trace(
        lambda: Odd(kind).double(), batch, lambda model, batch: model(batch["tokens"])
    )
    job = program.apply(parallel(cp=2)).lower(optimizer=ADAMW)
    assert bool(_sorted_rows(job.plan)) == (kind == "none")
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, [batch, batch], train_one_device(job, [batch, batch]))
    assert errors.exact, errors


# Refusals


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tp": 2, "etp": 1}, "all 2 ranks of tp have the same tokens"),
        ({"tp": 4, "sp": True, "etp": 2}, "etp=2 with tp=4"),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 3, "etp": 1}, r"(?s)ep=3 .*legal: ep=1 or 2 or 4"),
        ({"dp": 2, "ep": 4, "tp": 2, "sp": True}, "ep=4 does not divide dp=2"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_refused(degrees: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshError, match=said):
        parallel(**degrees)


def test_whole_experts_need_experts() -> None:
    with pytest.raises(MeshError, match="etp=1, but no region has the tag EP"):
        program_of("dense").apply(parallel(tp=2, sp=True, etp=1))


def _over_tp(sequence: dict[str, int] | None) -> Any:
    def strategy(s: piper.Schedule) -> None:
        s.mesh(tp=2)
        s.shard(where(EP="*"), over="tp")
        s.shard_tensor(where(EP=None), over="tp", sequence=sequence)

    return strategy


def test_ranks_with_equal_rows_share_no_experts() -> None:
    said = (
        r"(?s)requirement 8.*those that take_rows makes \(.*tensor_zoo.py:\d+\).*legal: sequence="
    )
    with pytest.raises(TensorError, match=said):
        program_of("mixture").apply(_over_tp(None)).lower()


def test_rows_that_code_of_ones_own_sorts_are_sorted_together() -> None:
    """A sort of torch is of all rows."""
    said = r"(?s)requirement 8.*those that index_select makes \(.*zoo.py:\d+\)"
    with pytest.raises(TensorError, match=said):
        program_of("experts").apply(_over_tp({"tokens": 1})).lower()
