"""Known traps about state that is cut (ZeRO), halves of backwards and recompute, by their number.

Most tests also put the fault in, to show that they would see it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.plan.slots import SUMS
from piper.plan.tasks import Task
from piper.plan.types import RankClass
from piper.runtime.worker.storages import optimizer_tensors
from piper.strategies import parallel
from piper.training.verify import Trained, compare, relative_error, train_one_device
from tests.loopback.faults import changed, noticed, without_waits
from tests.loopback.pools import loopback
from tests.loopback.storages import live
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("traps_of_state")  # its jobs are made once


@cache
def _job(name: str = "deep", **options: Any) -> Job:
    options.setdefault("microbatches", 8 // options.get("dp", 1))
    return program_of(name).apply(parallel(**options)).lower(optimizer=ADAMW)


@cache
def _one_step(name: str) -> Trained:
    return train_one_device(_job(name), batches_of(name)[:1])


def _exact(job: Job, name: str = "deep", seed: int = 3) -> bool:
    with job.launch("loopback", adversary=True, seed=seed) as run:
        return compare(run, batches_of(name), reference_of(name, job)).exact


V = {"pp": 2, "dp": 2, "ep": 2}


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_trap_01_the_turning_rank_of_a_v_hands_gradients_on_locally(schedule: str) -> None:
    """Stages 1 and 2 share a rank: BI of stage 1 takes what BI of stage 2 made, and not ones."""
    job = _job(schedule=schedule, **V)
    assert _exact(job)
    received = {(c.tag("PP"), str(c.slice)) for c in job.graph.comms if c.comm == "recv"}
    assert received == {(1, "pp=1"), (3, "pp=0"), (2, "pp=1"), (0, "pp=0")}
    # With ones in its place the result is another one.
    with job.launch("loopback") as run:
        for worker in run.workers.workers:
            _ones_for_tangents(job, worker)
        errors = compare(run, batches_of("deep")[:1], _one_step("deep"))
    assert errors.gradient > 1e-3


def _ones_for_tangents(job: Job, worker: Any) -> None:
    """Before the last backwards of stage 1: ones instead of the gradient that stage 2 made."""
    made = {
        value
        for node in job.graph.chunks
        if node.tag("PP") == 2 and node.phase in ("B", "BI")
        for value in node.outputs
        if job.graph.values[value].role == "grad"
    }
    for index, task in enumerate(worker.me.tasks):
        node = job.graph.nodes[task.name]
        if task.kind == "run" and task.phase in ("B", "BI") and node.tag("PP") == 1:
            for slot in (i for i in task.reads if worker.me.slots[i].name in made):
                worker.starts[index] = _filling(worker, slot, worker.starts[index])


def _filling(worker: Any, slot: int, start: Any) -> Any:
    def filled() -> Any:
        worker.slots[slot].fill_(1.0)
        return start()

    return filled


def test_trap_02_a_bi_waits_for_the_exchange_that_brings_its_gradient() -> None:
    """The tangent of experts comes through an all_to_all on another stream."""
    job = _job(schedule="dualpipev", **V)
    waiting = [
        task
        for part in job.plan.classes
        for task in part.tasks
        if task.kind == "run"
        and task.phase == "BI"
        and any(part.tasks[w].kind == "all_to_all" for w in task.waits)
    ]
    experts = [n for n in job.graph.chunks if n.phase == "BI" and n.tag("EP") is not None]
    assert len(waiting) >= len(experts) > 0
    plan = without_waits(job.plan, "BI", "all_to_all")
    assert "which is not there" in noticed(job, plan, batches_of("deep")[:1], _one_step("deep"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_trap_03_sharded_experts_have_updates_of_their_own(zero: int) -> None:
    """Experts are in other buckets than what is cut over all data ranks, and must step as well."""
    job = _job("moe", dp=4, ep=2, zero=zero)
    (part,) = job.plan.classes
    experts = {i for i, b in enumerate(job.plan.buckets) if "experts" in b.params[0]}
    assert all("experts" in n for i in experts for n in job.plan.buckets[i].params)
    updates = [task.bucket for task in part.tasks if task.kind == "update"]
    assert sorted(b for b in updates if b in experts) == sorted(experts) and len(experts) == 2
    assert _exact(job, "moe")
    with job.launch("loopback") as run:
        for worker in run.workers.workers:
            for index, task in enumerate(worker.me.tasks):
                if task.kind == "update" and task.bucket in experts:
                    worker.starts[index] = lambda: None
        assert not compare(run, batches_of("moe")[:1], _one_step("moe")).exact


@pytest.mark.parametrize(
    ("zero", "every"), [(0, None), (1, None), (2, None), (3, None), (2, 1), (3, 1)]
)
def test_trap_04_reductions_see_complete_sums_and_no_backward_races_with_them(
    zero: int, every: int | None
) -> None:
    """Once after the last microbatch, or each microbatch's own gradient."""
    job = _job(pp=2, dp=2, zero=zero, reduce_every=every)
    kind = "all_reduce" if zero == 0 else "reduce_scatter"
    for part in job.plan.classes:
        tasks = part.tasks
        summed = {
            i for i, s in enumerate(part.slots) if s.kind in ("grad", *SUMS) and s.bucket >= 0
        }
        reductions = [
            (i, t) for i, t in enumerate(tasks) if t.kind == kind and t.reads[0] in summed
        ]
        for index, task in reductions:
            adds = [i for i, t in enumerate(tasks) if t.kind == "add" and task.reads[0] in t.writes]
            assert adds and max(adds) < index  # nothing is added once it is being reduced
        sources = [task.reads[0] for _, task in reductions]
        assert len(set(sources)) == len(sources)
        buckets = {part.slots[source].bucket for source in sources}
        times = job.plan.num_microbatches if every else 1
        assert len(sources) == times * len(buckets) > 0
    plan = without_waits(job.plan, kind, "add")
    assert noticed(job, plan, batches_of("deep")[:1], _one_step("deep"))


@pytest.mark.parametrize("zero", [1, 2])
def test_trap_05_updated_parameters_are_gathered(zero: int) -> None:
    """Each rank updates its part alone; without the gather replicas drift apart."""
    job = _job("moe", dp=4, ep=2, zero=zero)
    with job.launch("loopback", adversary=True) as run:
        assert compare(run, batches_of("moe"), reference_of("moe", job)).exact
        assert run.differing_replicas() == []
    with job.launch("loopback") as run:
        for worker in run.workers.workers:
            gathers = {i for i, t in enumerate(worker.me.tasks) if t.kind == "all_gather"}
            assert gathers
            worker.write = _skipping(worker.write, gathers)
        run.step(batches_of("moe")[0])
        assert run.differing_replicas() != []


def _skipping(write: Any, skipped: set[int]) -> Any:
    return lambda index, results: None if index in skipped else write(index, results)


def test_trap_09_messages_are_matched_by_name_and_not_by_order_alone() -> None:
    """Two tensors of one shape, swapped, would train on without an error."""
    job = _job("skip", pp=2, dp=2, ep=2)
    sends = [i for i, t in enumerate(job.plan.classes[0].tasks) if t.kind == "send"][:2]
    first, second = (job.plan.classes[0].tasks[i] for i in sends)
    shapes = [job.plan.classes[0].slots[t.reads[0]].shape for t in (first, second)]
    assert shapes[0] == shapes[1] and first.stream == second.stream

    def swap(part: RankClass, index: int, task: Task) -> Task:
        if part is not job.plan.classes[0] or index not in sends:
            return task
        other = second if index == sends[0] else first
        return msgspec.structs.replace(task, key=other.key)

    why = noticed(job, changed(job.plan, swap), batches_of("skip")[:1], _one_step("skip"))
    assert "sends in another order than receives" in why


@pytest.mark.parametrize("kind", ["send", "reduce_scatter"])
def test_trap_10_nothing_is_freed_on_one_stream_while_another_reads_it(kind: str) -> None:
    """What communication reads outlives it, whoever made it and on whichever stream."""
    job = _job(pp=2, dp=2, zero=2, reduce_every=1)  # else sums are there until the step's end

    def freed_by_its_maker(part: RankClass, index: int, task: Task) -> Task:
        read = {s for t in part.tasks if t.kind == kind for s in t.reads}
        mine = {
            slot
            for slot in read & set(task.writes)
            if not any(slot in t.writes for t in part.tasks[index + 1 :])
            and part.slots[slot].kind in ("temp", "sum")
        }
        left = tuple(slot for slot in task.frees if slot not in read)
        return msgspec.structs.replace(task, frees=(*left, *sorted(mine)))

    plan = changed(job.plan, freed_by_its_maker)
    assert "which is not there" in noticed(job, plan, batches_of("deep")[:1], _one_step("deep"))


def test_trap_11_zero_3_gathers_every_use_and_keeps_nothing() -> None:
    """Gathered once and kept it would be ZeRO 1. What is there at each moment: test_gathered.py."""
    job = _job(pp=2, dp=2, zero=3)
    for part in job.plan.classes:
        gathered = {i for i, slot in enumerate(part.slots) if slot.kind == "gathered"}
        freed = [slot for task in part.tasks for slot in task.frees if slot in gathered]
        assert sorted(freed) == sorted(gathered)
        uses = [
            {part.slots[slot].base for slot in task.reads} & gathered
            for task in part.tasks
            if task.kind == "run"
        ]
        assert sum(map(len, uses)) == len(gathered)  # each gather serves one chunk
    with job.launch("loopback") as run:
        run.step(batches_of("deep")[0])
        for worker in run.workers.workers:
            assert live(worker, lambda slot: slot.kind in ("gathered", "flat")) == []


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _narrow_batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator).bfloat16()


def _masters_on_one_device(weights: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    """AdamW on float32 masters of a bfloat16 model, by hand; two halves of the batch."""
    model = Narrow().bfloat16()
    model.load_state_dict(weights)
    params = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in params.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    for seed in range(steps):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for rows in _narrow_batch(seed).chunk(2):
            model.zero_grad()
            model(rows).square().mean().backward()
            for name, param in params.items():
                assert param.grad is not None
                sums[name] += param.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / 2
        optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_trap_12_a_bfloat16_model_has_masters_and_state_in_float32(zero: int) -> None:
    """Small updates vanish in bfloat16: masters, moments and sums of gradients are wide."""
    program = piper.trace(
        lambda: Narrow().bfloat16(), _narrow_batch(0), lambda m, x: m(x).square().mean()
    )
    job = program.apply(parallel(dp=2, zero=zero, bucket_size=600)).lower(optimizer=ADAMW)
    with job.launch("loopback", adversary=True) as run:
        before = run.parameters()
        for seed in range(5):
            run.step(_narrow_batch(seed))
        for worker in run.workers.workers:
            assert {t.dtype for t in optimizer_tensors(worker)} == {torch.float32}
            sums = live(worker, lambda slot: slot.kind == "grad")
            assert {t.dtype for t in sums} == {torch.float32}
        after = run.parameters()
        masters = _masters(job, run)
    wanted = _masters_on_one_device(before, steps=5)
    assert masters.keys() == wanted.keys()
    for name, master in wanted.items():
        assert after[name].dtype == torch.bfloat16
        assert relative_error(masters[name], master) < 1e-6
        assert torch.equal(after[name], masters[name].bfloat16())
        assert not torch.equal(masters[name], masters[name].bfloat16().float())


def _masters(job: Job, run: Run) -> dict[str, torch.Tensor]:
    """The masters of all ranks, put together."""
    workers = run.workers.workers  # type: ignore[attr-defined]
    found = {}
    for number, bucket in enumerate(job.plan.buckets):
        parts = [[m.detach() for m in worker.updaters[number].masters] for worker in workers]
        if not bucket.over:
            found |= dict(zip(bucket.params, parts[0], strict=True))
            continue
        flat = torch.cat([part[0] for part in parts])
        for name, start, shape in zip(bucket.params, bucket.offsets, bucket.shapes, strict=True):
            found[name] = flat[start : start + torch.Size(shape).numel()].view(shape)
    return found


@pytest.mark.parametrize("recompute", [None, "nothing", "expensive"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_trap_16_nothing_saved_or_kept_shares_memory_with_a_gathered_parameter(
    schedule: str, recompute: Any
) -> None:
    """Else the gathered bucket would stay in memory, and be read after it was freed."""
    job = _job("tied", pp=2, dp=2, zero=3, schedule=schedule, recompute=recompute)
    seen = 0

    def look(worker: Any) -> None:
        nonlocal seen
        whole = live(worker, lambda slot: slot.kind in ("gathered", "shard"))
        held = {tensor.untyped_storage().data_ptr() for tensor in whole}
        saved = live(worker, lambda slot: slot.name.startswith(("$saved.", "$kept.")))
        seen += len(saved)
        assert not held & {tensor.untyped_storage().data_ptr() for tensor in saved}

    run = Run(job.plan, loopback(job.plan, job.bodies, observe=look))
    run.step(batches_of("tied")[0])
    assert seen > 100 or (recompute == "nothing" and schedule == "1f1b" and seen == 0)


@pytest.mark.parametrize("recompute", [None, "nothing", "expensive"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_trap_17_no_backward_runs_attention_that_nobody_reads(
    schedule: str, recompute: Any
) -> None:
    """Its forward is there only where all is computed again, and then once, before its backward."""
    job = _job("dense", pp=2, schedule=schedule, recompute=recompute)
    forward = '"aten._scaled_dot_product_flash_attention_for_cpu.default"'
    backward = '"aten._scaled_dot_product_flash_attention_for_cpu_backward.default"'
    for node in job.graph.chunks:
        text = job.bodies[node.body]
        counts = (text.count(forward), text.count(backward))
        if node.phase == "F":
            assert counts == (1, 0)
        elif node.phase == "B" or (node.phase == "BW" and node.tag("PP") == 0):
            assert counts == (int(recompute == "nothing"), 1)
        else:
            assert counts[1] == int(node.phase == "BI")
            assert counts[0] <= counts[1] * (recompute == "nothing")


def test_trap_20_recompute_sees_no_change_in_place() -> None:
    """A chunk that changes what it made, in place, computes the same again."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with piper.annotate("PP"):
                    x = layer(x)
                    x += 1.0
                    x.mul_(0.5)
                    x = torch.sin(x)
            return x

    batch = torch.randn(8, 16, dtype=torch.float64)
    program = piper.trace(lambda: Changing().double(), batch, lambda m, x: m(x).square().mean())
    for schedule in ("1f1b", "zb_h1"):
        strategy = parallel(pp=2, microbatches=4, schedule=schedule, recompute="nothing")
        job = program.apply(strategy).lower(optimizer=ADAMW)
        with job.launch("loopback", adversary=True) as run:
            assert compare(run, [batch], train_one_device(job, [batch])).exact


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_trap_22_halves_of_experts_with_no_row_and_with_one_row(schedule: str) -> None:
    """BI and BW of a sharded region, on ranks whose experts got nothing."""
    job = _job(schedule=schedule, zero=3, **V)
    rows: set[int] = set()

    def look(worker: Any) -> None:
        splits = [v for s, v in zip(worker.me.slots, worker.slots, strict=True) if s.kind == "host"]
        rows.update(sum(value[1]) for value in splits if value is not None)

    batches = batches_of("deep")[:2]
    for batch in batches:
        batch["route"][4:8] = 1  # whole microbatches without a row for experts 2 and 3
    run = Run(job.plan, loopback(job.plan, job.bodies, adversary=True, observe=look))
    assert compare(run, batches, train_one_device(job, batches)).exact
    assert {0, 1} <= rows and max(rows) > 8
