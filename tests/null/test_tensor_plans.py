"""Plans of strategies that cut tensors: what communicates, what a rank holds, which faults are seen."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.check import check_plan
from piper.check.prove import problems
from piper.frontend.name_patterns import as_patterns
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Split, block_sizes
from piper.plan.holdings import Holding, holdings
from piper.plan.tasks import Comm, Run, Task
from piper.plan.types import Plan, plan_from_json
from piper.strategies import parallel
from tests.tensor_zoo import program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")


@cache
def _job(name: str = "dense", **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)


def _collectives(job: Job) -> Counter[str]:
    """Those that serve the cut of tensors."""
    stream = [s.name for s in job.plan.streams].index("tensor")
    (part,) = job.plan.classes
    return Counter(t.comm for t in part.tasks if isinstance(t, Comm) and t.stream == stream)


@pytest.mark.parametrize("tp", [2, 4])
def test_collectives_are_those_of_megatron(tp: int) -> None:
    """A layer has two sums forward and two backward; where sequences are cut, what is gathered for a
    product is gathered again for its weight. Beside them there are the sum behind the table of
    tokens, the gradient in front of the head, and the terms of the loss; where sequences are cut also
    the gradient of positions, of which each rank reads a part."""
    layers = 2
    assert _collectives(_job(tp=tp)) == {"all_reduce": 4 * layers + 3}
    assert _collectives(_job(tp=tp, sp=True)) == {
        "all_gather": 6 * layers + 3, "reduce_scatter": 4 * layers + 2, "all_reduce": 2,
    }  # fmt: skip


def test_attention_by_heads_turns_four_tensors_a_layer() -> None:
    """Queries, keys and values there, the result back; gradients likewise."""
    job = _job(cp=2, cp_attention="heads")
    assert _collectives(job)["all_to_all"] == 2 * 4 * 2
    assert not _collectives(job).keys() & {"all_gather", "reduce_scatter"}
    assert not job.plan.gathered
    program = program_of("dense").apply(parallel(cp=2, cp_attention="heads"))
    assert "attention='heads'" in program.history_as_code()
    for what in ("activations", "gradients of activations"):
        line = f"all_to_all of {what} over cp at pp=0 on stream tensor: 8 in each microbatch"
        assert line in program.preview()


@pytest.mark.parametrize("form", ["heads", "ring"])
def test_sums_behind_attention_are_cut_along_sequences_still(form: str) -> None:
    """Whatever moves or takes apart parts of sequences in between."""
    alone = _collectives(_job(tp=2, sp=True))
    both = _collectives(_job(cp=2, tp=2, sp=True, cp_attention=form))
    for kind in ("all_gather", "reduce_scatter"):
        assert both[kind] == alone[kind]


def test_attention_by_heads_falls_back_where_heads_do_not_divide() -> None:
    job = _job(cp=4, tp=2, cp_attention="heads")
    assert "all_to_all" not in _collectives(job)
    assert "4 heads do not divide over 2 x 4 ranks: keys and values are gathered" in job.summary()


def test_what_was_found_is_written_down() -> None:
    program = program_of("dense").apply(parallel(tp=2, sp=True))
    code = program.history_as_code()
    assert "sequence={'tokens': 1, 'labels': 1}" in code
    directive = program.history[-2].directive
    assert directive.params == {
        "embed.weight": 0,
        "head.weight": 0,
        **{f"blocks.*.attention.{name}.weight": 0 for name in "qkv"},
        **{f"blocks.*.attention.{name}.bias": 0 for name in "qv"},
        "blocks.*.attention.o.weight": 1,
        **{f"blocks.*.{name}.weight": 0 for name in ("up", "gate")},
        "blocks.*.down.weight": 1,
    }
    again = program_of("dense").apply(program.history)
    plan = program.lower(optimizer=ADAMW).plan
    assert again.lower(optimizer=ADAMW).plan.content_hash() == plan.content_hash()
    assert plan_from_json(plan.to_json()) == plan


def test_layers_are_written_as_one_pattern_where_they_are_alike() -> None:
    names = [f"blocks.{i}.{w}" for i in range(3) for w in ("up", "down")] + ["head.0", "a.1.b"]
    alike = {name: 0 for name in names if "up" in name}
    assert as_patterns(alike, names) == {"blocks.*.up": 0}
    assert as_patterns(alike | {"blocks.1.up": 1}, names) == {
        "blocks.0.up": 0, "blocks.1.up": 1, "blocks.2.up": 0,
    }  # fmt: skip
    assert as_patterns({"blocks.0.up": 0, "a.1.b": 1, "head.0": 0}, names) == {
        "blocks.0.up": 0, "a.*.b": 1, "head.0": 0,
    }  # fmt: skip


class _Odd(nn.Module):
    """A vocabulary that does not divide, as 50257 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(self.up(x).relu()))


def test_what_does_not_divide_stays_whole_and_is_said() -> None:
    tokens = torch.arange(16).view(4, 4)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    job = piper.trace(_Odd, tokens, step).apply(parallel(tp=2)).lower(optimizer=ADAMW)
    said = "2 of 4 matrices are cut along tp; 2 whole: embed.weight, head.weight"
    assert said in job.summary()
    assert not job.plan.gathered  # nor is anything put together for them


def test_a_rank_holds_its_part() -> None:
    """Of what is cut a half or a quarter, of parameters and of all that is kept for them."""
    whole = sum(t.type.nbytes for t in _job(tp=2).plan.tensors.values())
    held = {}
    for tp in (2, 4):
        plan = _job(tp=tp).plan
        sizes = Counter({"param": 0, "master": 0, "state": 0})
        for one in holdings(plan, 1):
            if one.form == "elements":
                sizes[one.what] += 8 * (one.last - one.first)
        cut = sum(t.type.nbytes for t in plan.tensors.values() if t.cut)
        assert sizes["param"] == whole - cut + cut // tp
        assert sizes["state"] // 2 == sizes["master"] == sizes["param"]
        held[tp] = sizes["param"]
    assert held[4] < held[2] < whole


def _saved(**degrees: Any) -> int:
    (peak,) = _job("rms", **degrees).report.peaks
    return peak.by_category["saved"]


def test_what_is_saved_falls_with_the_ranks() -> None:
    """Without sequences residuals and norms are whole on every rank; with them nothing is, and what is
    gathered is gathered again instead of saved."""
    whole = _saved()
    for tp in (2, 4):
        assert whole / tp < _saved(tp=tp) < whole
        assert _saved(tp=tp, sp=True) <= 1.02 * whole / tp
        assert _saved(cp=tp) <= 1.02 * whole / tp


@pytest.mark.parametrize(
    ("name", "param", "way"),
    [
        ("fused", "blocks.0.attention.qkv.weight", (0, 3)),
        ("fused", "blocks.1.attention.qkv.bias", (0, 3)),
        ("grouped", "blocks.0.attention.qkv.weight", (0, (8, 4, 4))),
        ("grouped", "blocks.0.both.weight", (0, 2)),
        ("columns", "blocks.0.attention.qkv.weight", (1, 3)),
        ("columns", "blocks.0.attention.qkv.bias", (0, 3)),
    ],
)
def test_fused_matrices_are_found_in_blocks(name: str, param: str, way: Any) -> None:
    program = program_of(name).apply(parallel(tp=2))
    pattern = re.sub(r"\.\d\.", ".*.", param)
    assert program.history[-2].directive.params[pattern] == way
    assert f"{pattern!r}: {way!r}" in program.history_as_code()
    cut = dict(_job(name, tp=2).plan.tensors[param].cut)
    assert cut == {"tp": Split(*way)}


def test_a_fused_layer_communicates_as_one_of_three_matrices() -> None:
    assert _collectives(_job("fused", tp=2)) == _collectives(_job("dense", tp=2))
    assert _collectives(_job("fused", tp=2, sp=True)) == _collectives(_job("dense", tp=2, sp=True))
    assert _job("fused", tp=2).plan.gathered == ()


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["fused", "columns", "grouped"])
def test_each_element_is_held_by_the_right_ranks(name: str, zero: int) -> None:
    """Position i of a block is on the rank along tp whose part of the block it is in."""
    plan = _job(name, tp=2, dp=2, zero=zero).plan
    holders: dict[tuple[str, str], dict[int, set[int]]] = {}
    for rank in range(plan.mesh.size):
        for one in holdings(plan, rank):
            if one.form == "elements":
                numbers = range(math.prod(plan.tensors[one.tensor].shape))
                of = holders.setdefault(
                    (one.what + one.state, one.tensor), {n: set() for n in numbers}
                )
                for element in _numbers(plan, one):
                    of[element].add(plan.mesh.coordinates(rank)["tp"])
    for (_, tensor), found in holders.items():
        about = plan.tensors[tensor]
        row = math.prod(about.shape[1:])
        for element, ranks in found.items():
            wanted = {0, 1}
            for _, split in about.cut:
                at = element // row if split.dim == 0 else element % row
                wanted = {_part_of(at, block_sizes(split, about.shape[split.dim or 0]))}
            assert ranks == wanted, (tensor, element)


def _part_of(position: int, blocks: tuple[int, ...]) -> int:
    for block in blocks:
        if position < block:
            return position // (block // 2)
        position -= block
    raise AssertionError


def _numbers(plan: Plan, held: Holding) -> list[int]:
    """The elements of a holding, counted through the whole tensor."""
    shape = plan.tensors[held.tensor].shape
    found = [0]
    for num, spans in zip(shape, held.part.spans, strict=True):
        found = [
            f * num + at for f in found for begin, n in spans for at in range(begin, begin + n)
        ]
    return found[held.first : held.last]


# Faults


@cache
def _plan(sp: bool = False) -> Plan:
    return _job(tp=2, dp=2, sp=sp).plan


def _with(plan: Plan, index: int, task: Task) -> Plan:
    (part,) = plan.classes
    tasks = (*part.tasks[:index], task, *part.tasks[index + 1 :])
    return msgspec.structs.replace(plan, classes=(msgspec.structs.replace(part, tasks=tasks),))


def _first(plan: Plan, kind: str) -> tuple[int, Comm]:
    (part,) = plan.classes
    for index, task in enumerate(part.tasks):
        if isinstance(task, Comm) and task.comm == kind and part.slots[task.source].cut:
            return index, task
    raise AssertionError(kind)


def _seen(plan: Plan) -> str:
    check_plan(_plan())
    found = [p for p in problems(plan) if p.proof == "layouts"]
    assert found, "not seen"
    return found[0].message


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_over_another_axis_is_seen(kind: str) -> None:
    plan = _plan(sp=kind != "all_reduce")
    index, task = _first(plan, kind)
    other = next(i for i, group in enumerate(plan.groups) if group.over == ("dp",))
    said = _seen(_with(plan, index, msgspec.structs.replace(task, group=other)))
    assert f"for which it takes {kind} over tp" in said


def test_a_reader_of_terms_that_are_not_summed_is_seen() -> None:
    plan = _plan()
    _, task = _first(plan, "all_reduce")
    (part,) = plan.classes
    index, reader = next(
        (i, t)
        for i, t in enumerate(part.tasks)
        if isinstance(t, Run) and task.target in t.inputs and t.phase == "F"
    )
    inputs = tuple(task.source if slot == task.target else slot for slot in reader.inputs)
    said = _seen(_with(plan, index, msgspec.structs.replace(reader, inputs=inputs)))
    assert "which is tp: partial, but was traced for tp: replicated" in said


def test_what_a_body_was_traced_for_cannot_be_left_out() -> None:
    plan = _plan()
    (part,) = plan.classes
    index, run = next((i, t) for i, t in enumerate(part.tasks) if isinstance(t, Run) and t.sees)
    assert "but was traced for nothing" in _seen(_with(plan, index, _without(run, sees=())))
    assert "but was traced for nothing" in _seen(_with(plan, index, _without(run, makes=())))
    assert "of 1 of" in _seen(_with(plan, index, _without(run, sees=run.sees[:1])))


def _without(run: Run, **changes: Any) -> Run:
    return msgspec.structs.replace(run, **changes)


@pytest.mark.parametrize(("have", "other"), [(REPLICATED, PARTIAL), (PARTIAL, REPLICATED)])
def test_a_slot_of_another_layout_is_seen(have: Any, other: Any) -> None:
    """A result that is said to be whole where it is a term, or the other way."""
    plan = _plan()
    (part,) = plan.classes
    made = {s for t in part.tasks if isinstance(t, Run) and t.phase == "F" for s in t.outputs}
    index = next(i for i in sorted(made) if dict(part.slots[i].cut).get("tp") == have)
    slot = msgspec.structs.replace(part.slots[index], cut=(("tp", other),))
    slots = (*part.slots[:index], slot, *part.slots[index + 1 :])
    changed = msgspec.structs.replace(part, slots=slots)
    assert "traced for" in _seen(msgspec.structs.replace(plan, classes=(changed,)))


def test_gradients_that_are_summed_otherwise_than_they_lie_are_seen() -> None:
    """Norms are copied: alike on all ranks, or with sequences cut, terms of a sum."""
    alike, terms = _plan(), _plan(sp=True)
    for plan, field, said in ((alike, "same", "replicated"), (terms, "copies", "partial")):
        number, bucket = next(
            (i, b) for i, b in enumerate(plan.buckets) if "tp" in getattr(b, field)
        )
        other = "copies" if field == "same" else "same"
        axes = tuple(axis for axis in getattr(bucket, field) if axis != "tp")
        wrong = msgspec.structs.replace(
            bucket, **{field: axes, other: (*getattr(bucket, other), "tp")}
        )
        buckets = (*plan.buckets[:number], wrong, *plan.buckets[number + 1 :])
        assert f"tp: {said}, to a sum over" in _seen(msgspec.structs.replace(plan, buckets=buckets))


@pytest.mark.parametrize(
    "changes", [{"source": "dp"}, {"cut": (("tp", REPLICATED),)}, {"cut": ()}], ids=str
)
def test_a_coordinate_of_another_axis_is_seen(changes: dict[str, Any]) -> None:
    """Every rank would take another rank's part of tables and masks."""
    plan = _plan(sp=True)
    (part,) = plan.classes
    index = next(i for i, slot in enumerate(part.slots) if slot.kind == "coordinate")
    slot = msgspec.structs.replace(part.slots[index], **changes)
    slots = (*part.slots[:index], slot, *part.slots[index + 1 :])
    wrong = msgspec.structs.replace(plan, classes=(msgspec.structs.replace(part, slots=slots),))
    assert any("holds the rank's place along" in p.message for p in problems(wrong))


def test_gradients_that_do_not_say_how_they_lie_are_seen() -> None:
    plan = _plan()
    (part,) = plan.classes
    index = next(i for i, s in enumerate(part.slots) if s.kind == "temp" and s.source and s.cut)
    slots = list(part.slots)
    slots[index] = msgspec.structs.replace(slots[index], cut=())

    def silent(run: Run) -> Run:
        made = zip(run.outputs, run.makes, strict=True)
        return _without(run, makes=tuple(() if s == index else way for s, way in made))

    tasks = tuple(silent(t) if isinstance(t, Run) and index in t.outputs else t for t in part.tasks)
    changed = msgspec.structs.replace(part, slots=tuple(slots), tasks=tasks)
    assert "does not say how it lies" in _seen(msgspec.structs.replace(plan, classes=(changed,)))


def test_messages_have_one_layout_on_both_sides() -> None:
    plan = _job(tp=2, sp=True, pp=2, microbatches=2).plan
    first, second = plan.classes
    index = next(t.target for t in second.tasks if isinstance(t, Comm) and t.comm == "recv")
    slot = second.slots[index]
    assert slot.cut == (("tp", Split(1)),)  # the residual stream crosses in parts
    slots = (*second.slots[:index], msgspec.structs.replace(slot, cut=(("tp", SHARED),)))
    wrong = msgspec.structs.replace(second, slots=(*slots, *second.slots[index + 1 :]))
    found = problems(msgspec.structs.replace(plan, classes=(first, wrong)))
    assert any("expects tp: shared" in p.message for p in found if p.proof == "layouts")


@pytest.mark.parametrize("blocks", [1, 2, 4, (8, 4, 12)])
def test_other_blocks_than_those_of_the_code_are_seen(blocks: Any) -> None:
    """They are of the same shape everywhere, but other elements."""
    plan, name = _job("fused", tp=2).plan, "blocks.0.attention.qkv.weight"
    cut = (("tp", Split(0, blocks)),)
    tensors = {**plan.tensors, name: msgspec.structs.replace(plan.tensors[name], cut=cut)}
    found = problems(msgspec.structs.replace(plan, tensors=tensors))
    said = f"{name} is read as tp: split(0|3), but held as tp: {Split(0, blocks)}"
    assert [said in p.message for p in found if p.proof == "layouts"] == [True]


@pytest.mark.parametrize("blocks", [0, -3, 5, 24, 1 << 60, (), (8, 8), (12, 6, 6, 0), (23, 1)])
def test_impossible_blocks_are_refused(blocks: Any) -> None:
    plan, name = _job("fused", tp=2).plan, "blocks.0.attention.qkv.weight"
    cut = (("tp", Split(0, blocks)),)
    tensors = {**plan.tensors, name: msgspec.structs.replace(plan.tensors[name], cut=cut)}
    found = problems(msgspec.structs.replace(plan, tensors=tensors))
    assert any("cannot cut" in p.message and p.proof == "structure" for p in found)


# Directives


def _refused(match: str, **arguments: Any) -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(tp=2, dp=2)
        s.place(where(), mesh.at())
        s.replicate(where(), over="dp")
        s.shard_tensor(where(), **{"over": "tp", **arguments})

    with pytest.raises(piper.errors.PiperError, match=match):
        program_of("dense").apply(strategy).lower()


def test_what_cannot_be_cut_is_refused() -> None:
    near = r"no parameter is called 'head.bias' \(did you mean 'head.weight'\?\) \(requirement 3\)"
    _refused(rf"shard_tensor \(.*test_tensor_plans.py:\d+\): {near}", params={"head.bias": 0})
    _refused("has no dim 2", params={"head.weight": 2})
    _refused(r"the mesh has no axis 'tq' \(did you mean 'tp'\?\)", over="tq")
    _refused("the batch has no leaf 'token'", sequence={"token": 1})
    _refused("cannot be cut along dim 0", sequence={"tokens": 0})
    _refused("params='magic'", params="magic")
    _refused("would have two owners", over="dp")
    _refused("attention='head' .did you mean 'heads'", attention="head", batch={"tokens": 1})
    _refused("attention='heads', but no sequence is cut", attention="heads")
    blocks = r"dim 0 of head.weight \[16, 8\] is not made of the blocks"
    _refused(rf"{blocks} 3 \(requirement 3\)", params={"head.weight": (0, 3)})
    _refused(rf"{blocks} 0", params={"head.weight": (0, 0)})
    _refused(rf"{blocks} \(8, 4\)", params={"head.weight": (0, (8, 4))})
    _refused(rf"{blocks} \(20, -4\)", params={"head.weight": (0, (20, -4))})
    _refused(rf"{blocks} \(\)", params={"head.weight": (0, ())})
    _refused(rf"{blocks} 'all'", params={"head.weight": (0, "all")})
    _refused("has no dim 2", params={"head.weight": (2, 2)})
    _refused(r"has no dim \(0, 1, 2\)", params={"head.weight": (0, 1, 2)})
    part = r"a block of 1 of dim 0 of head.weight \[16, 8\] does not divide over 2 ranks"
    _refused(rf"{part} \(requirement 4\)", params={"head.weight": (0, 16)})
    _refused(rf"{part}", params={"head.weight": (0, (14, 1, 1))})


def test_a_dim_in_blocks_is_cut_by_one_axis() -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(a=2, b=2)
        s.place(where(), mesh.at())
        s.shard_tensor(where(), over="a", params={"*.up.weight": (0, 2)})
        s.shard_tensor(where(), over="b", params={"*.up.weight": 0})

    said = r"dim 0 of blocks.0.up.weight is cut along a already, and in blocks \(requirement 3\)"
    with pytest.raises(piper.errors.TensorError, match=said):
        program_of("dense").apply(strategy)


def test_two_directives_do_not_cut_a_parameter_in_two_ways() -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(tp=2)
        s.place(where(), mesh.at())
        s.shard_tensor(where(PP=0), over="tp", params={"embed.weight": 0})
        s.shard_tensor(where(PP=1), over="tp", params={"embed.weight": 1})

    said = r"embed.weight would be split\(1\) along tp, and is split\(0\) already"
    with pytest.raises(piper.errors.TensorError, match=said):
        program_of("tied").apply(strategy)


def test_an_axis_shares_tensors_everywhere_or_nowhere() -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(tp=2)
        s.place(where(), mesh.at())
        s.shard_tensor(where(PP=0), over="tp")
        s.replicate(where(PP=1), over="tp")

    with pytest.raises(piper.errors.TensorError, match="shares no tensors along tp, but other"):
        program_of("dense").apply(strategy).lower()
