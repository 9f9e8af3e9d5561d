"""Plans with experts that are cut inside: what is found, what communicates, which faults are seen."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.check import check_plan
from piper.check.prove import problems
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Split
from piper.plan.holdings import holdings
from piper.plan.tasks import Comm, Run
from piper.plan.types import Plan
from piper.strategies import parallel
from tests.tensor_zoo import BATCH, LENGTH, WIDTH, program_of
from tests.zoo import ADAMW, EXPERTS

pytestmark = pytest.mark.xdist_group("tensor")
CUT = {
    "blocks.*.mixture.up": (1, 2),
    "blocks.*.mixture.up_bias": (1, 2),
    "blocks.*.mixture.down": 1,
}


@cache
def _job(name: str = "mixture", **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)


def _comms(plan: Plan, stream: str = "tensor") -> list[tuple[str, tuple[int, ...]]]:
    number = [s.name for s in plan.streams].index(stream)
    (part,) = plan.classes
    comms = (t for t in part.tasks if isinstance(t, Comm) and t.stream == number)
    return [(t.comm, part.slots[t.source].shape) for t in comms]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "dp": 2, "ep": 2}], ids=str)
def test_experts_are_cut_by_column_and_by_row(degrees: dict[str, Any]) -> None:
    """Whether they are sharded or not."""
    program = program_of("mixture").apply(parallel(**degrees))
    found = next(r.directive.params for r in program.history if r.directive.kind == "shard_tensor")
    assert {name: way for name, way in found.items() if "mixture" in name} == CUT
    plain = program_of("experts").apply(parallel(**degrees))
    found = next(r.directive.params for r in plain.history if r.directive.kind == "shard_tensor")
    experts = {n: way for n, way in found.items() if "experts" in n}
    assert experts == {"blocks.*.moe.experts.up": 2, "blocks.*.moe.experts.down": 1}


def test_sums_over_ranks_are_of_tokens_and_not_of_their_copies() -> None:
    """Behind the experts, where copies are added up; and in front of them, of gradients likewise. The
    weights of experts get their gradient as a sum, too."""
    tokens = (BATCH, LENGTH, WIDTH)
    without, found = (Counter(_comms(_job(name, tp=2).plan)) for name in ("dense", "mixture"))
    layers, rows = 2, BATCH * LENGTH
    assert found - without == {
        ("all_reduce", tokens): layers,
        ("all_reduce", (rows, WIDTH)): layers,
        ("all_reduce", (rows, 2, 1)): layers,
    }
    assert not without - found


def test_with_sequences_cut_experts_cost_what_a_dense_layer_costs() -> None:
    """Rows are gathered for them once, and their sums end in parts; beside that, numbers of experts and
    weights, which are small."""
    kinds = [
        Counter(kind for kind, shape in _comms(_job(name, tp=2, sp=True).plan) if WIDTH in shape)
        for name in ("dense", "mixture")
    ]
    kinds[1].subtract(kinds[0])
    assert {kind: num for kind, num in kinds[1].items() if num} == {
        "all_gather": 2 * 2,  # of rows forward, of the gradient of the sum backward
        "reduce_scatter": 2 * 2,
    }


def test_a_rank_holds_its_part_of_its_experts() -> None:
    plan = _job(tp=2, dp=2, ep=2).plan
    for rank in range(plan.mesh.size):
        at = plan.mesh.coordinates(rank)
        held = {h.tensor: h for h in holdings(plan, rank) if h.what == "param"}
        of_up, of_down = (held[f"blocks.1.mixture.{name}"].part.spans for name in ("up", "down"))
        experts = ((at["ep"] * EXPERTS // 2, EXPERTS // 2),)
        assert of_up[0] == of_down[0] == experts
        gate = at["tp"] * WIDTH
        assert of_up[1] == ((gate, WIDTH), (2 * WIDTH + gate, WIDTH))
        assert of_down[1] == ((at["tp"] * WIDTH, WIDTH),)


# Faults


@cache
def _plan() -> Plan:
    plan = _job(tp=2, dp=2, ep=2).plan
    check_plan(plan)
    return plan


def _said(part: Any) -> str:
    wrong = msgspec.structs.replace(_plan(), classes=(part,))
    found = [p for p in problems(wrong) if p.proof == "layouts"]
    assert found, "not seen"
    return found[0].message


def test_sums_of_experts_that_are_left_out_are_seen() -> None:
    """Whoever reads what came back as if it were whole: the sum, or its first reader."""
    (part,) = _plan().classes
    tasks = list(part.tasks)
    back = next(t for t in tasks if isinstance(t, Comm) and t.comm == "all_to_all" and t.reverse)
    assert dict(part.slots[back.target].cut)["tp"] == PARTIAL
    index, reader = next(
        (i, t) for i, t in enumerate(tasks) if isinstance(t, Run) and back.target in t.inputs
    )
    sees = tuple(
        (("tp", REPLICATED),) if slot == back.target else way
        for slot, way in zip(reader.inputs, reader.sees, strict=True)
    )
    tasks[index] = msgspec.structs.replace(reader, sees=sees)
    said = _said(msgspec.structs.replace(part, tasks=tuple(tasks)))
    assert "which is tp: partial, but was traced for tp: replicated" in said


def test_sums_of_experts_over_another_axis_are_seen() -> None:
    plan = _plan()
    (part,) = plan.classes
    groups = {group.over: number for number, group in enumerate(plan.groups)}
    made = next(
        t
        for t in part.tasks
        if isinstance(t, Run)
        and t.phase == "F"
        and any(dict(way).get("tp") == SHARED for way in t.sees)
        and any(dict(way).get("tp") == PARTIAL for way in t.makes)
    )
    index = next(
        i for i, t in enumerate(part.tasks) if isinstance(t, Comm) and t.source in made.outputs
    )
    tasks = list(part.tasks)
    tasks[index] = msgspec.structs.replace(tasks[index], group=groups["ep",])
    assert "for which it takes" in _said(msgspec.structs.replace(part, tasks=tuple(tasks)))


def test_experts_that_were_traced_for_another_cut_are_seen() -> None:
    (part,) = _plan().classes
    index = next(
        i for i, s in enumerate(part.slots) if s.kind == "param" and s.source.endswith("down")
    )
    slot = msgspec.structs.replace(part.slots[index], cut=(("tp", Split(2)),))
    slots = (*part.slots[:index], slot, *part.slots[index + 1 :])
    found = problems(
        msgspec.structs.replace(_plan(), classes=(msgspec.structs.replace(part, slots=slots),))
    )
    assert any("is read as" in p.message and "held as" in p.message for p in found)


# Refusals


def _sharded(params: Any) -> Job:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(ep=2, tp=2)
        s.place(where(), mesh.at())
        s.replicate(where(EP=None), over="ep")
        s.shard(where(EP="*"), over="ep")
        s.shard_tensor(where(EP=None), over="tp", params={})
        s.shard_tensor(where(EP="*"), over="tp", params=params)

    return program_of("experts").apply(strategy).lower(optimizer=ADAMW)


def test_dims_can_be_said() -> None:
    plan = _sharded({"*.experts.up": 2, "*.experts.down": 1}).plan
    assert dict(plan.tensors["blocks.0.moe.experts.up"].cut) == {"ep": Split(0), "tp": Split(2)}


def test_communication_inside_of_sharded_experts_is_refused() -> None:
    said = r"would communicate along tp in between \(requirement 7\)"
    with pytest.raises(piper.errors.TensorError, match=said) as error:
        _sharded({"*.experts.up": 2})
    assert "behind tanh" in str(error.value) and "in F[PP=0,EP=0]" in str(error.value)


class _Sizes(nn.Module):
    """Experts whose code knows how many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            hidden = piper.grouped_mm(rows, self.up, counts).view(rows.shape[0] // 2, 2, 8)
            return piper.grouped_mm(hidden.tanh().view(rows.shape), self.down, counts)

        rows = batch["rows"]
        weights = torch.ones_like(rows[:, :1])
        return piper.mixture(experts, rows, batch["chosen"], weights, num_experts=4).square().mean()


def test_code_that_knows_the_number_of_rows_is_refused() -> None:
    batch = {"rows": torch.randn(16, 8), "chosen": torch.arange(16).view(16, 1) % 4}
    program = piper.trace(_Sizes, batch, lambda model, batch: model(batch))

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(ep=2, tp=2)
        s.place(where(), mesh.at())
        s.replicate(where(EP=None), over="ep")
        s.shard(where(EP="*"), over="ep")
        s.shard_tensor(where(), over="tp", params={"up": 2, "down": 1})

    said = "does not run with fewer experts or another number of rows"
    with pytest.raises(piper.errors.TraceError, match=said):
        program.apply(strategy).lower()
