"""Gradients that are not finite: a step that is skipped has never been; the first bad task is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import piper
from piper.errors import RunError
from piper.strategies import parallel
from piper.training.nan_guard import MOST_IN_A_ROW


class _Net(nn.Module):
    """Two stages with what a step keeps: statistics of a norm, and dropout, which draws by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
        self.norm, self.dropout = nn.BatchNorm1d(6).double(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.dropout(self.norm(self.first(x)))
        with piper.annotate("PP"):
            return self.second(x)


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # The square root of a negative number is a NaN; its gradient is one, too.
    return (model(batch["x"]).square().mean() * batch["scale"].sqrt().mean()).clone()


def _batch(seed: int, *, bad: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.ones(8, dtype=torch.float64)
    scale[5] = -1.0 if bad else 1.0
    return {"x": torch.randn(8, 4, dtype=torch.float64, generator=generator), "scale": scale}


GOOD = [_batch(seed) for seed in range(4)]
BAD = _batch(9, bad=True)


def _job(degrees: dict[str, Any], **options: Any) -> piper.Job:
    narrow = "precision" in options
    make_model = (lambda: _Net().float()) if narrow else _Net
    batch = {name: leaf.float() if narrow else leaf for name, leaf in GOOD[0].items()}
    program = piper.trace(make_model, batch, _step).apply(parallel(**degrees))
    return program.lower(optimizer=piper.adamw(lr=1e-2), ema=0.9, **options)


def _state(run: piper.Run) -> list[Tensor]:
    found = [*run.parameters().values(), *run.buffers().values(), *run.ema().values()]
    return [*found, *(t for kept in run.optimizer_state().values() for t in kept.values())]


ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"clip": 0.5}),
    ({"dp": 2, "zero": 1}, {"clip": math.inf}),
    ({"dp": 2, "zero": 2}, {"clip": 0.5, "precision": "bf16"}),
    ({"pp": 2, "microbatches": 2, "schedule": "zb_h1"}, {"clip": 0.5, "late_clip": True}),
    ({"pp": 2, "dp": 2, "zero": 3, "microbatches": 2}, {"clip": math.inf}),
]


@pytest.mark.parametrize(("degrees", "options"), ROWS)
def test_a_skipped_batch_has_never_been(degrees: dict[str, Any], options: dict[str, Any]) -> None:
    job = _job(degrees, **options)
    with job.launch("loopback") as run:
        without = [run.step(batch) for batch in GOOD]
        wanted, steps = _state(run), run.steps
    with job.launch("loopback", adversary=True) as run:
        results = [
            run.step(batch, skip_nan=True) for batch in (BAD, *GOOD[:2], BAD, BAD, *GOOD[2:], BAD)
        ]
        found = _state(run)
        assert run.steps == steps == 4 and not run.differing_replicas()
    assert [result.skipped for result in results] == [1, 0, 0, 1, 1, 0, 0, 1]
    assert [r.loss for r in results if not r.skipped] == [result.loss for result in without]
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_without_skipping_a_bad_batch_ruins_the_parameters() -> None:
    with _job({"dp": 2}, clip=0.5).launch("loopback") as run:
        assert not run.step(BAD).skipped
        assert any(param.isnan().any() for param in run.parameters().values())


def test_a_norm_that_clips_nothing_changes_no_bit() -> None:
    measured, plain = _job({"dp": 2, "zero": 2}, clip=math.inf), _job({"dp": 2, "zero": 2})
    with measured.launch("loopback") as one, plain.launch("loopback") as other:
        for batch in GOOD:
            assert one.step(batch).norm and other.step(batch).norm is None
        pairs = zip(one.parameters().values(), other.parameters().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_skipping_takes_the_norm() -> None:
    with (
        _job({}).launch("loopback") as run,
        pytest.raises(RunError, match=r"lower\(clip=math.inf\)"),
    ):
        run.step(GOOD[0], skip_nan=True)
    with pytest.raises(RunError, match='on_nan="skip", but the job does not measure'):
        piper.train(_job({}), GOOD, steps=1, launch="loopback", on_nan="skip")
    with pytest.raises(RunError, match="on_nan='sometimes'"):
        piper.train(_job({}), GOOD, steps=1, launch="loopback", on_nan="sometimes")  # type: ignore[arg-type]


def _halved(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def test_training_goes_on_as_if_the_batch_were_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = _job({"pp": 2, "microbatches": 2}, clip=0.5)
    options: dict[str, Any] = {"launch": "loopback", "lr_schedule": _halved}
    plain = piper.train(job, GOOD, steps=4, **options)
    data = [GOOD[0], BAD, BAD, *GOOD[1:]]
    skipped = piper.train(job, data, steps=4, on_nan="skip", **options)
    assert skipped.losses == plain.losses and [r.lr for r in skipped.records][-1] == 1e-2 / 8
    assert [record.not_trained for record in skipped.records] == [0, 2, 0, 0]
    assert skipped.position.samples == 8 * 6 and skipped.position.steps == 4
    printed = capsys.readouterr().out
    assert printed.count("warning: step 2: loss nan, norm nan: the batch is skipped") == 2
    assert printed.strip().endswith("2 skipped for NaN")


def test_training_whose_steps_are_all_skipped_ends() -> None:
    with pytest.raises(RunError, match=f"step 1: {MOST_IN_A_ROW} batches one after the other"):
        piper.train(_job({}, clip=1.0), [BAD] * 30, steps=2, launch="loopback", on_nan="skip")


def _stopped(job: piper.Job, data: list[Any]) -> str:
    with pytest.raises(RunError) as caught:
        piper.train(job, data, steps=len(data), launch="loopback", on_nan="stop", log="none")
    return str(caught.value)


def test_stop_names_the_first_bad_task() -> None:
    job = _job({"pp": 2, "dp": 2, "microbatches": 2}, clip=math.inf)
    text = _stopped(job, [*GOOD[:2], BAD])
    # Row 5 of 8 is in microbatch 0 of data rank 1; the loss is made in the last stage.
    assert text.startswith("step 3: loss nan, norm nan; parameters are those of before")
    assert "rank 3: F[PP=1,MB=0], from place (" in text
    assert "makes a NaN of values that have none" in text


def test_stop_names_what_was_given() -> None:
    batch = _batch(3)
    batch["x"][7, 2] = math.nan
    text = _stopped(_job({"dp": 2, "microbatches": 2}, clip=math.inf), [GOOD[0], batch])
    assert "is given a NaN in x of the batch, in microbatch 1 of data rank 1" in text


def test_stop_without_a_norm_ends_by_the_loss() -> None:
    text = _stopped(_job({}), [GOOD[0], BAD])
    assert text.startswith("step 2: loss nan") and "lower(clip=math.inf)" in text


def test_the_origin_is_of_a_skipped_step() -> None:
    with _job({}, clip=1.0).launch("loopback") as run:
        run.step(BAD, skip_nan=True)
        assert "makes a NaN" in run.origin_of_nan()
        before = _state(run)
        run.origin_of_nan()
        assert all(torch.equal(*pair) for pair in zip(before, _state(run), strict=True))
        run.step(GOOD[0], skip_nan=True)
        with pytest.raises(RunError, match="the last step was not skipped"):
            run.origin_of_nan()


@pytest.mark.parametrize("frozen", ["first norm", "second"])
def test_a_rank_that_steps_nothing_skips_with_all_others(frozen: str) -> None:
    """Else it would go on with statistics and random numbers of a step that has never been."""

    def make_model() -> nn.Module:
        model = _Net()
        for name in frozen.split():
            model.get_submodule(name).requires_grad_(False)
        return model

    strategy = parallel(pp=2, microbatches=2)
    job = piper.trace(make_model, GOOD[0], _step).apply(strategy).lower(clip=0.5)
    bad = {**GOOD[1], "x": GOOD[1]["x"].clone().fill_(math.nan)}
    with job.launch("loopback") as run:
        wanted = [run.step(batch).loss for batch in GOOD]
    with job.launch("loopback") as run:
        found = [run.step(GOOD[0]).loss]
        assert run.step(bad, skip_nan=True).skipped and run.steps == 1
        assert "is given a NaN in x of the batch" in run.origin_of_nan()
        found += [run.step(batch, skip_nan=True).loss for batch in GOOD[1:]]
        assert all(buffer.isfinite().all() for buffer in run.buffers().values())
    assert found == wanted


class _Rooted(_Net):
    """A NaN arises in front of a norm with statistics."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.sqrt(3.0 + self.first(x))
        with piper.annotate("PP"):
            return self.second(self.norm(x))


def test_statistics_that_a_step_has_spoilt_itself_are_not_blamed() -> None:
    program = piper.trace(_Rooted, GOOD[0], _step).apply(parallel(pp=2, microbatches=2))
    large = {**GOOD[0], "x": 1e4 * GOOD[0]["x"]}
    with program.lower(clip=0.5).launch("loopback") as run:
        assert run.step(large, skip_nan=True).skipped
        assert run.origin_of_nan().startswith("rank 0: F[PP=0,MB=0]")
