"""Batches of several shapes: a plan for each, all of which train the same parameters as one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import piper
from piper.api.job import Job
from piper.check.peak import most_bytes
from piper.errors import CheckError, PlanError, RunError, TraceError
from piper.passes.dispatch import passing_sums
from piper.runtime.worker.storages import held_bytes
from piper.strategies import parallel
from piper.training.verify import compare, load_initial, train_one_device
from tests.loopback import ragged

STRATEGIES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "microbatches": 4},
    "dp2 zero 3": {"dp": 2, "zero": 3, "microbatches": 2, "bucket_size": 300},
    "pp2 dp2 zero 2": {"pp": 2, "dp": 2, "zero": 2, "microbatches": 2, "schedule": "zbv"},
    "one": {},
}
LOWERED: dict[str, dict[str, Any]] = {
    "pp2": {"clip": 0.5, "late_clip": True},
    "dp2 zero 3": {"ema": 0.9},
    "pp2 dp2 zero 2": {"clip": 0.5},
    "one": {},
}


def _job(name: str, **options: Any) -> Job:
    program = ragged.program().apply(parallel(**STRATEGIES[name]))
    return program.lower(optimizer=piper.adamw(lr=0.01), **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_lengths_that_vary_and_a_smaller_last_batch_train_as_on_one_device(name: str) -> None:
    """Dropout goes on by the number of the step, AdamW by its own, BatchNorm by its running values."""
    job = _job(name, **LOWERED[name])
    batches = ragged.batches()
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
        assert errors.exact, errors
        assert [found.role for found in run.compiled] == ["train 2", "train 3", "train 4"]
        if job.plan.ema is not None:
            assert not torch.equal(run.ema()["layers.0.weight"], run.masters()["layers.0.weight"])


def test_a_scheduled_rate_and_running_values_go_on_over_all_shapes() -> None:
    """`piper.train` beside a loop as anybody writes it; without dropout, which draws otherwise."""

    def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 0.7**step)

    def make_model() -> nn.Module:
        model = ragged.Mixer()
        model.dropout.p = 0.0
        return model

    batches = ragged.batches()
    program = piper.trace(make_model, batches[0], ragged.step)
    for options in ({"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}):
        job = program.apply(parallel(**options)).lower(optimizer=piper.adamw(lr=0.05))
        model = make_model()
        load_initial(model, job)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = schedule(optimizer)
        losses = []
        for batch in batches:
            halves = [{k: leaf.chunk(2)[half] for k, leaf in batch.items()} for half in range(2)]
            parts = [ragged.step(model, half) / 2 for half in halves]
            losses.append(sum(part.item() for part in parts))
            optimizer.zero_grad()
            sum(parts[1:], parts[0]).backward()
            optimizer.step()
            scheduler.step()
        with job.launch("loopback") as run:
            found = piper.train(
                run, batches, steps=None, lr_schedule=schedule, log="none", evaluate=batches
            )
            mine, buffers = run.parameters(), run.buffers()
            wanted = []
            with torch.no_grad():
                for batch in batches:
                    halves = [{k: leaf.chunk(2)[h] for k, leaf in batch.items()} for h in range(2)]
                    wanted.append(sum(float(ragged.step(model.eval(), h)) for h in halves) / 2)
        assert found.losses == pytest.approx(losses, rel=1e-11)
        assert found.records[-1].evaluation == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)
        for key, param in model.named_parameters():
            torch.testing.assert_close(mine[key], param.detach(), rtol=1e-9, atol=1e-11)
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[key], buffer, rtol=1e-10, atol=1e-12)


def test_each_shape_is_compiled_once_and_shares_its_tensors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = _job("dp2 zero 3")
    with job.launch("loopback") as run:
        piper.train(run, ragged.batches() * 2, steps=None)
        assert len(run.compiled) == 3
        for member in run.workers.pool.members:  # type: ignore[attr-defined]
            first = member.workers["train"]
            for role in ("train 2", "train 3", "train 4"):
                other = member.workers[role]
                assert other.updaters is first.updaters and other.steps is first.steps
            last = first.steps.last
            holding = [w for w in member.workers.values() if _has_gradients(w)]
            assert holding == [last] != [first]  # those of the last step, and no others
            left, asked = last.tensors("grad"), first.tensors("grad")
            assert left.keys() == asked.keys() and any(tensor.any() for tensor in left.values())
            assert all(torch.equal(left[key], asked[key]) for key in left)
            assert held_bytes(first)["gradients"] == held_bytes(last)["gradients"] > 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.rpartition(": ")[0] for line in lines if line.startswith("compiled")]
    assert told == [
        "compiled training for batches of tokens [8, 4], labels [8, 4]",
        "compiled training for batches of tokens [8, 9], labels [8, 9]",
        "compiled training for batches of tokens [4, 6], labels [4, 6]",
    ]


@pytest.mark.parametrize("first", [True, False])
def test_gradients_are_those_of_the_last_step_wherever_plans_keep_them(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of their sums in one plan, in memory of their own in the other."""
    apart = first

    def passing(nodes: Any, values: Any) -> set[str]:
        names = {name for node in nodes for name in node.outputs} if apart else set()
        return {name for name in names if values[name].role == "unreduced"}

    monkeypatch.setattr(passing_sums, "_passing_of", passing)
    job, batches = _job("dp2 zero 3", ema=0.9), ragged.batches()
    apart = not first
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors


def _has_gradients(worker: Any) -> bool:
    slots = zip(worker.me.slots, worker.slots, strict=True)
    return any(slot.kind == "grad" and tensor is not None for slot, tensor in slots)


def test_plans_are_compiled_alike_where_the_user_wants_no_gradients() -> None:
    job, batches = _job("pp2"), ragged.batches()[:2]
    with job.launch("loopback") as run, torch.no_grad():
        losses = [run.step(batch).loss for batch in batches * 2]
        evaluated = run.evaluate(batches[1]).loss
    with job.launch("loopback") as run:
        assert [run.step(batch).loss for batch in batches * 2] == losses
        assert run.evaluate(batches[1]).loss == evaluated
    assert losses[3] != losses[1]


def test_rows_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with _job("pp2 dp2 zero 2").launch("loopback") as run:
        loss = run.step(ragged.batch(8, 6, 0)).loss
        with pytest.raises(RunError) as refused:
            run.step(ragged.batch(6, 6, 0))
        assert str(refused.value) == (
            "run.step (tests/loopback/test_shapes.py:168): a batch of 6 samples does not divide into 2 "
            "data ranks x 2 microbatches\n"
            "  legal: a multiple of 4; a DataLoader with drop_last=True has no smaller batch"
        )
        with pytest.raises(RunError, match="a batch of 0 samples does not divide"):
            run.step(ragged.batch(0, 6, 0))
        assert run.step(ragged.batch(8, 6, 0)).loss != loss  # the run goes on


def test_there_is_a_limit_to_the_number_of_shapes() -> None:
    with _job("one").launch("single", shapes=2) as run:
        for length in (6, 4, 6, 4):
            run.step(ragged.batch(8, length, 0))
        with pytest.raises(RunError) as refused:
            run.step(ragged.batch(8, 5, 0))
    assert str(refused.value) == (
        "run.step (tests/loopback/test_shapes.py:184): a batch of tokens [8, 5], labels [8, 5]: of "
        "another shape than the 2 so far, and a plan is compiled for each\n"
        "    tokens [8, 6], labels [8, 6]\n"
        "    tokens [8, 4], labels [8, 4]\n"
        "  legal: batches padded to a few lengths, or launch(..., shapes=N)"
    )
    with pytest.raises(PlanError, match="shapes=0"):
        _job("one").launch("single", shapes=0)


def test_a_shape_that_breaks_the_limit_of_memory_is_named_with_the_line() -> None:
    """Witnesses name the lines of directives, which are not those that give the batch."""
    large = ragged.batch(80, 6, 0)
    limit = most_bytes(_job("pp2").plan)
    shown = (
        r"\(tests/loopback/test_shapes.py:\d+\): a batch of tokens \[80, 6\](, labels \[80, 6\])?: "
    )
    over = shown + "limit: .* needs (.|\n)* legal: a smaller batch, replicate"
    with _job("pp2", memory_limit=limit).launch("loopback") as run:
        run.step(ragged.batch(8, 6, 0))
        with pytest.raises(CheckError, match=rf"run\.step {over}") as refused:
            run.step(large)
        assert ".py:" in "".join(refused.value.details)
        with pytest.raises(CheckError, match=rf"run\.evaluate {over}"):
            run.evaluate(large)
        with pytest.raises(CheckError, match=rf"run\.predict {over}"):
            run.predict(large, lambda model, batch: model(batch["tokens"]))


def test_what_cannot_be_another_shape_of_the_same_batch() -> None:
    good = ragged.batch(8, 6, 0)
    with _job("one").launch("single") as run:
        with pytest.raises(RunError, match=r": labels is int64\[8\]"):
            run.step({**good, "labels": good["labels"][:, 0]})
        with pytest.raises(RunError, match="differ in their number of samples"):
            run.step({**good, "labels": good["labels"][:4]})
        with pytest.raises(RunError, match=r": labels is int32\[8, 6\]"):
            run.step({**good, "labels": good["labels"].int()})


def test_a_saved_job_has_the_shape_that_it_was_compiled_for(tmp_path: Path) -> None:
    _job("one").save(tmp_path / "job.json")
    with piper.load_job(tmp_path / "job.json").launch("single") as run:
        run.step(ragged.batch(8, 6, 0))
        with pytest.raises(PlanError, match=r"legal: batches of tokens \[8, 6\], labels \[8, 6\]"):
            run.step(ragged.batch(8, 4, 0))


class _ByLength(nn.Module):
    """Long batches go through one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.always = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(self.long(x) if x.shape[1] > 4 else x)


def test_a_model_that_reads_other_parameters_for_another_shape_is_refused() -> None:
    program = piper.trace(_ByLength, torch.randn(4, 6, 4), lambda model, x: model(x).mean())
    with program.apply(parallel(dp=2)).lower().launch("loopback") as run:
        with pytest.raises(TraceError, match=r"trains other parameters for \* \[4, 3, 4\]"):
            run.step(torch.randn(4, 3, 4))
        run.step(torch.randn(4, 7, 4))
