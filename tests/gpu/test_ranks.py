"""Law 1 on NCCL: ranks that share one GPU train like one device."""

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import piper
from piper.api.job import Job
from piper.errors import RunError
from piper.runtime.worker.weights import initial_value
from piper.strategies import parallel
from piper.training.verify import compare
from tests.float32_mode import Float32Mode
from tests.gpu.conftest import GetPool
from tests.matrix import EXPERTS, MODEL, SCHEDULE, ZERO, Cell
from tests.zoo import ADAMW, batches_of, reference_of

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import dense

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]


def _cell(number: int) -> Cell:
    """Every axis turns at its own pace, so that a few cases have all values."""
    model = MODEL[number % len(MODEL)]
    experts = EXPERTS[(number // len(ZERO) + number) % 2] if model != "dense" else "copied"
    schedule = SCHEDULE[1 + number % (len(SCHEDULE) - 1)]
    return Cell(number % len(ZERO), schedule, experts, model, dp=2)


CELLS = [_cell(number) for number in range(28)]
LONG = [
    Cell(0, "1f1b", "copied", "tied", pp=4, dp=1),
    Cell(0, "zb_h1", "copied", "moe", pp=4, dp=1),
]


@pytest.mark.parametrize("cell", [*CELLS, *LONG], ids=lambda cell: cell.name)
def test_trains_like_one_device(pool: GetPool, cell: Cell) -> None:
    job = cell.job("cuda")
    with job.launch(pool(4)) as run:
        errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
    assert errors.exact, errors


COMPILED = [
    Cell(2, "dualpipev", "sharded", "moe", dp=2),
    Cell(3, "zbv", "copied", "dense", dp=2),
    Cell(1, "interleaved_1f1b", "sharded", "dropout", dp=2),
    Cell(0, "1f1b", "copied", "recompute", dp=2),
]


@pytest.mark.parametrize("cell", COMPILED, ids=lambda cell: cell.name)
def test_compiled_bodies_train_like_one_device(pool: GetPool, cell: Cell) -> None:
    job = cell.job("cuda")
    with job.launch(pool(4), compile=True) as run:
        errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
    assert errors.exact, errors


@pytest.mark.parametrize(("rounded", "steps"), [(True, 30), (False, 12)])
def test_bfloat16_beside_one_device(pool: GetPool, rounded: bool, steps: int) -> None:
    """Losses against plain torch: bf16 copies of float32 masters; losses, norms and sums in float32.

    Torch rounds a weight's gradient to bf16 before it is added. Piper's kernels do not, where they add
    it themselves; after some 20 steps that alone makes other losses, so that fewer are compared."""
    batches = [dense.batch(seed % 3) for seed in range(30)]
    program = piper.trace(dense.model, batches[0], dense.step)
    strategy = parallel(pp=2, dp=2, zero=2, schedule="zbv", microbatches=4)
    job = program.apply(strategy).lower(optimizer=ADAMW, device="cuda", precision="bf16")
    assert job.plan.products
    if rounded:
        job.plan = msgspec.structs.replace(job.plan, products={})
    with job.launch(pool(4)) as run:
        losses = [run.step(batch).loss for batch in batches[:steps]]
    wanted = _one_device(job, batches)
    assert wanted[-1] < 0.8 * wanted[0]
    # bf16 rounds to 4e-3; only additions differ
    assert losses == pytest.approx(wanted[:steps], rel=2e-3)


def _one_device(job: Job, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    plan = job.plan
    model = dense.model().cuda()
    masters = {
        name: initial_value(plan.tensors[name], job.bodies, seed=plan.seed).cuda()
        for name, _ in model.named_parameters()
    }
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    model.bfloat16()
    losses = []
    for batch in batches:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        total, sums = 0.0, {name: torch.zeros_like(master) for name, master in masters.items()}
        for piece in range(8):
            rows = {key: leaf.chunk(8)[piece].cuda() for key, leaf in batch.items()}
            with Float32Mode():
                loss = dense.step(model, rows)
            loss.backward()
            total += float(loss.detach())
            for name, param in model.named_parameters():
                sums[name] += param.grad
                param.grad = None
        for name, master in masters.items():
            master.grad = sums[name] / 8
        optimizer.step()
        losses.append(total / 8)
    return losses


def test_state_is_what_the_plan_says(pool: GetPool) -> None:
    for zero in ZERO:
        job = Cell(zero, "1f1b", "copied", "dense", dp=2).job("cuda")
        with job.launch(pool(4)) as run:
            run.step(batches_of("deep_dense")[0])
            measured = run.memory()
        kept = {peak.label: peak.kept for peak in job.report.peaks}
        for rank, found in enumerate(measured):
            for what in ("parameters", "gradients", "optimizer"):
                wanted = kept[f"pp={rank // 2}"][what]
                assert found[what] == pytest.approx(wanted, rel=0.02), (zero, rank, what)


def test_a_killed_rank_is_named_and_the_next_run_starts(pool: GetPool) -> None:
    cell = Cell(2, "dualpipev", "copied", "moe", dp=2)
    job = cell.job("cuda")
    run = job.launch(pool(4))
    run.step(batches_of(cell.program)[0])
    os.kill(pool(4).processes[2].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"rank 2 was killed \(SIGKILL"):
        run.step(batches_of(cell.program)[0])
    with job.launch(pool(4)) as again:
        assert again.step(batches_of(cell.program)[0]).loss > 0


def test_a_stopped_rank_is_named(pool: GetPool) -> None:
    cell = Cell(0, "1f1b", "copied", "dense", dp=2)
    job = cell.job("cuda")
    run = job.launch("local", ranks_per_gpu=4, timeout=4)
    run.step(batches_of(cell.program)[0])
    os.kill(run.workers.pool.processes[1].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^rank 1 "):
        run.step(batches_of(cell.program)[0])
