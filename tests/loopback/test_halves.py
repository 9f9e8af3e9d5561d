"""Law 3: BI and BW are B cut in two: nothing is computed twice, and nothing comes out otherwise."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.bodies.cutting.partition import is_view
from piper.bodies.files.codec import decode, load
from piper.plan.body_spec import BodySpec, ChunkBodies, Ref
from piper.plan.memory_use import memory_use
from piper.plan.tasks import Task
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from tests.strategies import strategy_of
from tests.zoo import ADAMW, CASES, PIECES, batches_of, program_of


def _job(name: str) -> Job:
    chosen = "ep2" if CASES[name].experts else "one"
    return program_of(name).apply(strategy_of(chosen, "none")).lower()


def _bodies(job: Job, phase: str = "B") -> dict[tuple[str, str], ChunkBodies]:
    """The bodies of all chunks of a job whose backward is whole (B) or in halves (BI), by those of F and
    of that phase."""
    forwards = {node.name: node.body for node in job.graph.chunks if node.phase == "F"}
    used = {(forwards[n.forward], n.body) for n in job.graph.chunks if n.phase == phase}
    all_bodies = job.source.bodies._made.values()
    return {key: found for found in all_bodies if (key := _key(found, phase)) in used}


def _key(bodies: ChunkBodies, phase: str) -> tuple[str, str]:
    return tuple(bodies.by_phase[p].hash if p in bodies.by_phase else "" for p in ("F", phase))  # type: ignore[return-value]


def _operators(text: str) -> Counter[str]:
    """What a body computes. Views, sizes and copies at its boundary are no computation."""
    free = (operator.getitem, torch.ops.aten.sym_size.int, torch.ops.aten.clone.default)
    nodes = [n for n in decode(text).graph.nodes if n.op == "call_function"]
    return Counter(str(n.target) for n in nodes if n.target not in free and not is_view(n))


@pytest.mark.parametrize("name", list(CASES))
def test_law_3_bw_never_recomputes_bi(name: str) -> None:
    job = _job(name)
    texts = job.source.bodies.texts
    halved = 0
    for bodies in (*_bodies(job).values(), *_bodies(job, "BI").values()):
        found = {phase: _operators(texts[spec.hash]) for phase, spec in bodies.by_phase.items()}
        halves = found.get("BI", Counter()) + found.get("BW", Counter())
        assert halves == found["B"]
        halved += "BI" in found and "BW" in found
    assert halved >= 1


@pytest.mark.parametrize("name", list(CASES))
def test_law_3_halves_give_bitwise_what_the_whole_gives(name: str) -> None:
    """On the real tensors of a step, in place of every B."""
    job = _job(name)
    compared: Counter[str] = Counter()
    with job.launch("loopback") as run:
        known = _bodies(job)
        for worker in run.workers.workers:
            for index, task in enumerate(worker.me.tasks):
                if task.kind == "run" and task.phase == "B":
                    node: Any = job.graph.nodes[task.name]
                    bodies = known[job.graph.nodes[node.forward].body, task.body]  # type: ignore[union-attr]
                    worker.starts[index] = _comparing(job, worker, task, bodies, compared)
        run.step(batches_of(name)[0])
    assert compared["BI"] and compared["BW"]


def _comparing(
    job: Job, worker: Worker, task: Task, bodies: ChunkBodies, compared: Counter[str]
) -> Any:
    texts = job.source.bodies.texts

    def call(spec: BodySpec, values: dict[Ref, torch.Tensor]) -> dict[Ref, torch.Tensor]:
        results = load(texts[spec.hash])([values[ref] for ref in spec.inputs])
        return dict(zip(spec.outputs, results, strict=True))

    def start() -> None:
        whole = bodies.by_phase["B"]
        values = dict(zip(whole.inputs, (worker.slots[i] for i in task.reads), strict=True))
        wanted = call(whole, values)
        found: dict[Ref, torch.Tensor] = {}
        for phase in ("BI", "BW"):
            if phase in bodies.by_phase:
                found |= call(bodies.by_phase[phase], values | found)
                compared[phase] += 1
        for ref, slot in zip(whole.outputs, task.writes, strict=True):
            assert torch.equal(found[ref], wanted[ref])
            worker.slots[slot] = found[ref]

    return start


def test_law_3_a_first_stage_has_no_bi() -> None:
    job = program_of("dense").apply(parallel(pp=2, microbatches=PIECES, schedule="zb_h1")).lower()
    phases = {(n.tag("PP"), n.phase) for n in job.graph.chunks}
    assert phases == {(0, "F"), (0, "BW"), (1, "F"), (1, "BI"), (1, "BW")} | (
        phases & {(0, "B"), (1, "B")}
    )
    run = {task.phase for task in job.plan.classes[0].tasks if task.kind == "run"}
    assert "BI" not in run and "BW" in run


def test_law_3_gradients_of_norm_weights_are_final_in_bi() -> None:
    job = program_of("dense").apply(parallel(pp=2, microbatches=PIECES, schedule="zb_h1")).lower()
    made: dict[str, set[str]] = {"BI": set(), "BW": set()}
    for node in job.graph.chunks:
        if node.tag("PP") == 1 and node.phase in made:
            values = [job.graph.values[name] for name in node.outputs]
            made[node.phase] |= {v.of for v in values if v.role == "param_grad"}
    assert made["BI"] == {"stages.1.norm.weight", "stages.1.norm.bias"}
    assert {"stages.1.qkv.weight", "stages.1.mlp.weight", "head.weight"} <= made["BW"]


def test_bw_reads_no_parameters() -> None:
    """So that they may be freed after BI. Without a BI, on a first stage, BW is the whole backward."""
    for schedule in ("zb_h1", "zbv"):
        strategy = parallel(pp=2, dp=2, ep=2, microbatches=4, schedule=schedule)
        job = program_of("deep").apply(strategy).lower()
        inputs = {node.forward for node in job.graph.chunks if node.phase == "BI"}
        weights = [n for n in job.graph.chunks if n.phase == "BW" and n.forward in inputs]
        assert len(weights) >= 3 * 4
        for node in weights:
            assert all(job.graph.values[name].role != "param" for name in node.inputs)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = x + layer(x)
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_is_cast_to_a_wider_dtype_is_saved_as_it_was(schedule: str) -> None:
    """Norms read float32 under bf16: neither a backward nor its weight part is given that."""
    program = piper.trace(Normed, torch.randn(8, 6), lambda model, x: model(x).float().mean())
    strategy = parallel(pp=2, microbatches=4, schedule=schedule)
    plan = program.apply(strategy).lower(optimizer=ADAMW, precision="bf16").plan
    for found in plan.classes:
        uses = zip(found.slots, memory_use(found.slots, found.tasks), strict=True)
        saved = [slot for slot, use in uses if use == "saved" and slot.shape == (2, 6)]
        assert saved and {slot.dtype for slot in saved} == {"bfloat16"}


def test_a_part_that_is_cast_is_saved_alone() -> None:
    """Not all of the tensor that it is a part of."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(self.layer(x)[:, :2].float()).sum()

    program = piper.trace(Part, torch.randn(8, 64), lambda model, x: model(x))
    found = program.lower(optimizer=ADAMW, precision="bf16").plan.classes[0]
    uses = zip(found.slots, memory_use(found.slots, found.tasks), strict=True)
    shapes = [slot.shape for slot, use in uses if use == "saved" and slot.dtype == "float32"]
    assert (8, 2) in shapes
