"""Known traps of systems of this kind: regression tests by the trap's number in the design.

Those about state that is cut, halves of backwards and recompute are in `test_traps_of_state.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.api.program import Program
from piper.bodies.cutting.joint import runner
from piper.bodies.files.codec import decode
from piper.bodies.store import BodyStore
from piper.errors import ScheduleError, TraceError
from piper.schedules import SCHEDULES
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of, reference_of


def _job(name: str, strategy: str, schedule: str = "1f1b") -> Job:
    return program_of(name).apply(strategy_of(strategy, schedule)).lower(optimizer=ADAMW)


def _assert_exact(job: Job, batches: list[Any]) -> None:
    reference = train_one_device(job, batches)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=5) as run:
            errors = compare(run, batches, reference)
        assert errors.exact, errors


class Layers(nn.Module):
    """One linear layer per stage; `between` is what the first stage hands on."""

    def __init__(self, num: int, between: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
                if index == 0 and self.between is not None:
                    x = self.between(x)
        return x


def _program(num: int, between: Callable[[torch.Tensor], Any] | None = None) -> Program:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    return piper.trace(lambda: Layers(num, between).double(), _batch(0), step)


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_trap_01_neighbouring_stages_on_the_turning_rank_of_a_v_exchange_locally() -> None:
    """Two neighbouring stages on one rank: what passes between them is not sent."""

    def v_shape(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2)
        for stage, rank in enumerate((0, 1, 1, 0)):
            s.place(where(PP=stage), mesh.at(pp=rank))
        s.split(where(), "MB", 4)

    job = _program(4).apply(v_shape).lower(optimizer=ADAMW)
    _assert_exact(job, [_batch(0), _batch(1)])
    crossing = {(c.tag("PP"), str(c.slice)) for c in job.graph.comms if c.comm == "recv"}
    # Forward 0>1 and 2>3, backward 3>2 and 1>0: nothing between stages 1 and 2.
    assert crossing == {(1, "pp=1"), (3, "pp=0"), (2, "pp=1"), (0, "pp=0")}


def test_trap_04_an_accumulated_gradient_is_reduced_once_after_the_last_microbatch() -> None:
    """Reducing a running sum after every microbatch would count early microbatches again and again."""
    job = _job("dense", "pp2_dp2")
    for part in job.plan.classes:
        names = [task.name for task in part.tasks]
        reduces = [i for i, n in enumerate(names) if n.startswith("reduce")]
        adds = [i for i, n in enumerate(names) if n.startswith("add>B")]
        assert len(reduces) == 1 and len(adds) == job.plan.num_microbatches
        assert max(adds) < reduces[0]
        assert max(adds) in part.tasks[reduces[0]].waits


def test_trap_06_sums_are_averaged_over_unequal_counts() -> None:
    """Ranks and microbatches with other numbers of tokens: the divisor is the sum of all counts."""
    job = _job("counted", "pp2_dp2")
    batch = batches_of("counted")[0]
    shares = [(batch["labels"][part] != -100).sum() for part in (slice(0, 8), slice(8, 16))]
    assert shares[0] != shares[1]
    with job.launch("loopback", adversary=True) as run:
        result = run.step(batch)
        assert result.count == float(sum(shares))
    with job.launch("loopback") as run:
        assert compare(run, batches_of("counted"), reference_of("counted", job)).exact


def test_trap_07_replicas_start_equal_and_no_strategy_changes_the_weights() -> None:
    """Copies with weights of their own would never come together."""
    first = None
    for name in ("one", "pp2_dp2", "pp2_dp2_ep2"):
        with _job("moe", name, "1f1b" if "pp" in name else "none").launch("loopback") as run:
            assert run.differing_replicas() == []
            weights = run.parameters()
        first = first or weights
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[n], first[n]) for n in first)
    two = [first[f"stages.{i}.qkv.weight"] for i in range(2)]  # type: ignore[index]
    assert not torch.equal(*two)  # equal code, but each name has its own seed


def test_trap_08_every_microbatch_and_data_rank_has_its_own_rows() -> None:
    """Ranks that train on the same rows learn less, and nothing fails."""
    job = _job("dense", "pp2_dp2")
    run = job.launch("loopback")
    batch = batches_of("dense")[0]
    seen = []
    for worker in run.workers.workers:
        rows = batch["tokens"].chunk(2)[worker.me.data_rank]
        share = {f"batch:{n}": x.chunk(2)[worker.me.data_rank] for n, x in batch.items()}
        worker.load_batch(share)
        for index, slot in worker.batch_slots:
            if slot.source == "batch:tokens":
                assert torch.equal(worker.slots[index], rows[2 * slot.microbatch :][:2])
                seen.append((worker.me.data_rank, slot.microbatch))
    assert sorted(seen) == [(d, m) for d in range(2) for m in range(4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb"])
def test_trap_14_fewer_microbatches_than_ranks_train(schedule: str) -> None:
    """A schedule whose steady phase never starts must not hang."""
    strategy = parallel(pp=4, microbatches=2, schedule=schedule)
    job = _program(8).apply(strategy).lower(optimizer=ADAMW)
    _assert_exact(job, [_batch(0), _batch(1)])


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zb"])
def test_trap_14_two_rounds_of_four_microbatches_on_three_ranks_train(schedule: str) -> None:
    strategy = parallel(pp=3, microbatches=8, schedule=schedule)
    job = _program(6).apply(strategy).lower(optimizer=ADAMW)
    _assert_exact(job, [_batch(0), _batch(1)])


def test_trap_14_a_schedule_that_needs_more_says_how_many() -> None:
    with pytest.raises(ScheduleError, match="legal: at least twice the ranks: 4 microbatches"):
        _program(4).apply(parallel(pp=2, microbatches=3, schedule="dualpipev"))


def test_trap_15_the_loss_is_known_on_every_rank() -> None:
    """Not on the ranks of the last stage alone."""
    with _job("dense", "pp2_dp2").launch("loopback") as run:
        results = run.workers.step(
            {f"batch:{name}": leaf for name, leaf in batches_of("dense")[0].items()}
        )
    assert len(results) == 4
    assert len({result["loss"] for result in results}) == 1


def test_trap_16_no_saved_value_shares_memory_with_a_parameter() -> None:
    """A saved view would keep the whole parameter alive, and see it change."""
    job = _job("tied", "one", "none")
    with job.launch("single") as run:
        worker = run.workers.workers[0]
        worker.load_batch({f"batch:{n}": leaf for n, leaf in batches_of("tied")[0].items()})
        held = {t.untyped_storage().data_ptr() for t in worker.tensors("param").values()}
        saved = 0
        with torch.no_grad():
            for index, task in enumerate(worker.me.tasks):
                worker.starts[index]()
                for slot in task.writes if task.kind == "run" else ():
                    if worker.me.slots[slot].name.startswith("$saved."):
                        saved += 1
                        assert worker.slots[slot].untyped_storage().data_ptr() not in held
        assert saved > 20


def test_trap_17_no_attention_forward_is_left_in_a_backward() -> None:
    """A backward with a forward in it whose results nobody reads."""
    job = _job("dense", "pp2")
    bodies = {n.phase: set() for n in job.graph.chunks}  # type: ignore[var-annotated]
    for node in job.graph.chunks:
        bodies[node.phase].add(job.bodies[node.body])
    forward = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert all(forward in text for text in bodies["F"])
    assert all(forward not in text and backward in text for text in bodies["B"])


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda x: x[:, 1:], id="view"),
        pytest.param(lambda x: x.expand_as(x), id="alias"),
        pytest.param(lambda x: torch.cat([x, x]).chunk(2)[1], id="part"),
    ],
)
def test_trap_18_an_output_that_shares_memory_keeps_its_gradient(
    between: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    job = _program(2, between).apply(parallel(pp=2, microbatches=2)).lower(optimizer=ADAMW)
    _assert_exact(job, [_batch(0), _batch(1)])


def test_trap_18_an_input_handed_on_unchanged_keeps_its_gradient() -> None:
    class Through(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                first = self.layers[0](x)
            with piper.annotate("PP"):
                second, same = self.layers[1](first), first.view(-1, 6)
            with piper.annotate("PP"):
                return self.layers[2](second) * torch.sigmoid(same.view(first.shape))

    program = piper.trace(
        lambda: Through(3).double(), _batch(0), lambda model, batch: model(batch).square().mean()
    )
    _assert_exact(program.apply(parallel(pp=3, microbatches=2)).lower(optimizer=ADAMW), [_batch(0)])


def test_trap_19_a_transposed_output_gets_a_contiguous_tangent() -> None:
    program = _program(2, lambda x: x.new_ones(6, 5) @ x.transpose(1, 2).transpose(1, 2) * 0.1)
    _assert_exact(program.apply(parallel(pp=2, microbatches=2)).lower(optimizer=ADAMW), [_batch(0)])

    class Turned(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                x = self.layers[0](x).transpose(0, 1)
            with piper.annotate("PP"):
                return self.layers[1](x.transpose(0, 1))

    program = piper.trace(
        lambda: Turned(2).double(), _batch(0), lambda model, batch: model(batch).square().mean()
    )
    _assert_exact(program.apply(parallel(pp=2, microbatches=2)).lower(optimizer=ADAMW), [_batch(0)])


def test_trap_20_a_change_in_place_that_another_chunk_sees_is_refused() -> None:
    class Changing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                first = self.layers[0](x)
            with piper.annotate("PP"):
                first += 1.0
                return self.layers[1](first)

    with pytest.raises(TraceError, match=r"changed in place that other regions made .*test_traps"):
        piper.trace(
            lambda: Changing(2), _batch(0).float(), lambda model, batch: model(batch).mean()
        )


def test_trap_20_a_change_in_place_inside_a_chunk_is_fine() -> None:
    class Changing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                first = self.layers[0](x)
                first += 1.0
                first.mul_(0.5)
            with piper.annotate("PP"):
                return self.layers[1](first)

    program = piper.trace(
        lambda: Changing(2).double(), _batch(0), lambda model, batch: model(batch).square().mean()
    )
    _assert_exact(program.apply(parallel(pp=2, microbatches=2)).lower(optimizer=ADAMW), [_batch(0)])


def test_trap_21_devices_and_kernels_are_those_of_the_lowering() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(6, device=x.device) < 4
            x = x.unsqueeze(1)
            attended = F.scaled_dot_product_attention(x, x * self.weight, x)
            return torch.where(mask, attended, 0.0)

    program = piper.trace(Masked, torch.ones(2, 3, 6), lambda model, batch: model(batch).mean())
    traced = program.source.at(2)[1]
    code = traced.chunks[0].code
    # Code that was captured on one device runs on another: its constants move along.
    fakes = [torch.empty(i.spec.shape, device="meta") for i in code.inputs]
    assert [out.device.type for out in runner(code, device="meta")(*fakes)] == ["meta"]
    store = BodyStore()
    text = store.texts[store.chunk(code, device="cpu").by_phase["F"].hash]
    assert "meta" not in text
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in text
    decode(text)(*[torch.ones(i.spec.shape) for i in code.inputs])


def test_trap_22_experts_with_no_row_and_with_one_row() -> None:
    """Shapes of 0 and 1 rows are where tracing specialises."""
    rows: list[int] = []
    for strategy in ("pp2_ep2", "pp2_dp2_ep2"):
        job = _job("moe", strategy)
        with job.launch("loopback") as run:
            for worker in run.workers.workers:
                for index, task in enumerate(worker.me.tasks):
                    if task.kind == "read":
                        worker.starts[index] = _recording(worker, task, worker.starts[index], rows)
            assert compare(run, batches_of("moe"), reference_of("moe", job)).exact
    assert {0, 1} <= set(rows) and max(rows) > 8  # rows that one rank's experts got in a microbatch


def _recording(worker: Any, task: Any, start: Callable[[], None], into: list[int]) -> Any:
    def record() -> None:
        start()
        into.append(sum(worker.slots[task.writes[0]][1]))

    return record


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "auto"])
def test_trap_14_every_schedule_trains_with_few_microbatches_or_says_what_it_needs(
    schedule: str,
) -> None:
    """Fewer microbatches than stages: a schedule or an error, never a hang."""
    trained = refused = 0
    for microbatches in (1, 2):
        try:
            strategy = parallel(pp=2, microbatches=microbatches, schedule=schedule)
            job = _four().apply(strategy).lower(optimizer=ADAMW)
        except ScheduleError as error:
            assert "legal" in str(error)
            refused += 1
            continue
        batches = [_batch(0)]
        with job.launch("loopback", adversary=True) as run:
            assert compare(run, batches, train_one_device(job, batches)).exact
        trained += 1
    assert trained or refused == 2


@cache
def _four() -> Program:
    return _program(4)


def test_trap_13_lowering_does_not_grow_faster_than_the_graph() -> None:
    """4 times the microbatches are 4 times the nodes; squares would take 16 times as long."""
    times, sizes = [], []
    for microbatches in (32, 128):
        rows = torch.ones(microbatches, 2, 6, dtype=torch.float64)
        program = piper.trace(
            lambda: Layers(4).double(), rows, lambda model, batch: model(batch).square().mean()
        )
        applied = program.apply(parallel(pp=2, microbatches=microbatches, schedule="zbv"))
        applied.lower()  # bodies are made once
        start = time.process_time()
        sizes.append(len(applied.lower().graph.nodes))
        times.append(time.process_time() - start)
    assert sizes[1] > 3.5 * sizes[0]
    assert times[1] < 9 * times[0], times
