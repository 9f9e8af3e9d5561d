"""Trainings whose steps begin before the last one is over: the same records and state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import piper
from piper.api.run import Run
from piper.errors import RunError
from piper.runtime.launch.pool_run import PoolRun
from piper.strategies import parallel

STEPS = 12


def _batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 4, generator=generator).double()}


def _batches(num: int = STEPS) -> list[dict[str, Tensor]]:
    """The third is smaller than others."""
    return [_batch(seed, 4 if seed == 2 else 8) for seed in range(num)]


def data(share: piper.Share) -> Iterator[Any]:
    for batch in _batches():
        yield {"x": batch["x"].chunk(2)[share.rank]}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss = (model(batch["x"]) - 1).square().mean()
    return loss, {"twice": 2 * loss.detach()}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 2)).double()


@pytest.fixture(scope="module")
def job() -> piper.Job:
    program = piper.trace(_model, _batch(0), _step)
    strategy = parallel(dp=2, zero=1, microbatches=2)
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=0.1), clip=1.0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that began before the last one was over."""
    own, found = Run.begin, []

    def begin(self: Run, batch: Any = None) -> Any:
        found.append(self.steps + 1)
        return own(self, batch)

    monkeypatch.setattr(Run, "begin", begin)
    return found


def _facts(training: piper.Training) -> list[dict[str, Any]]:
    """All that does not depend on the time that it took."""
    timed = {"ms": 0.0, "per_second": 0.0, "mfu": None, "memory": 0}
    return [
        msgspec.to_builtins(msgspec.structs.replace(record, **timed)) for record in training.records
    ]


def exponential(optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.8)


class Heard:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, record: Any) -> None:
        self.steps.append(record.step)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, range(2, 13)),
        ({"steps": 7, "data": data}, range(2, 8)),
        ({"lr_schedule": exponential, "epochs": 1}, range(2, 13)),
        ({"evaluate": [_batch(50)], "evaluate_every": 4}, [2, 3, 5, 6, 7, 9, 10, 11]),
        ({"lr_schedule": lambda o: ReduceLROnPlateau(o, patience=0)}, []),
        ({"on_nan": "skip"}, []),
        ({"callbacks": [Heard()]}, range(2, 13)),
        ({"watch": "127.0.0.1:0", "watch_every": 0, "log": "text"}, range(2, 13)),
    ],
    ids=["plain", "share", "schedule", "evaluation", "plateau", "skip", "hears", "watched"],
)
def test_records_and_state_are_the_same(
    job: piper.Job, begun: list[int], options: dict[str, Any], ahead: Any
) -> None:
    options = {"log": "none", **options}
    found, state = _trained(job, {"ahead": True, **options})
    assert begun == list(ahead)
    wanted, wanted_state = _trained(job, dict(options))
    assert begun == list(ahead)  # a training waits for each step, if it is not asked
    assert _facts(found) == _facts(wanted) and state == wanted_state
    assert found.position == wanted.position


def _trained(job: piper.Job, options: dict[str, Any]) -> tuple[piper.Training, dict[str, Any]]:
    with job.launch("loopback") as run:
        training = piper.train(run, options.pop("data", _batches()), **options)
        return training, {name: tensor.tolist() for name, tensor in run.state_dict().items()}


def test_checkpoints_have_what_they_would_have(
    job: piper.Job, begun: list[int], tmp_path: Path
) -> None:
    """A step is waited for where it is saved, and as long as ranks write."""
    wanted, state = _trained(job, {"steps": STEPS, "log": "none"})
    options: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 5, "log": "none"}
    options["ahead"] = True
    piper.train(job, _batches(), steps=7, launch="loopback", **options)
    assert 5 not in begun and {2, 3, 4} <= set(begun)
    found = piper.train(job, _batches(), steps=STEPS, launch="loopback", resume=True, **options)
    assert _facts(found) == _facts(wanted)
    with job.resume(max(tmp_path.iterdir()), "loopback") as run:
        assert {name: tensor.tolist() for name, tensor in run.state_dict().items()} == state


def test_recorded_steps_are_waited_for(job: piper.Job, begun: list[int], tmp_path: Path) -> None:
    path = tmp_path / "some.timeline"
    piper.train(
        job, _batches(), launch="loopback", record=path, record_steps="3:5", log="none", ahead=True
    )
    assert path.exists() and begun == list(range(5, 13))


def test_data_that_fails_comes_behind_the_steps_before(job: piper.Job, begun: list[int]) -> None:
    def failing() -> Iterator[dict[str, Tensor]]:
        yield from _batches(5)
        raise ValueError("no more")

    heard = Heard()
    with job.launch("loopback") as run, pytest.raises(ValueError, match="no more"):
        piper.train(run, failing(), callbacks=[heard], log="none", ahead=True)
    assert begun == [2, 3, 4, 5] and heard.steps == [1, 2, 3, 4, 5]


def test_a_step_that_cannot_begin_comes_behind_the_ones_before(
    job: piper.Job, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, own = Heard(), PoolRun.begin

    def begin(self: PoolRun, leaves: Any, *, role: str = "train") -> None:
        if begun[-1] == 4:
            raise RunError("not this one")
        own(self, leaves, role=role)

    monkeypatch.setattr(PoolRun, "begin", begin)
    with job.launch("loopback") as run, pytest.raises(RunError, match="not this one"):
        piper.train(run, _batches(), callbacks=[heard], log="none", ahead=True)
    assert heard.steps == [1, 2, 3]


def test_who_is_asked_to_end_in_the_last_step_stops_there(
    job: piper.Job, begun: list[int], tmp_path: Path
) -> None:
    class Asks(Heard):
        def on_step(self, record: Any) -> None:
            if record.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    training = piper.train(
        job, _batches(), steps=5, launch="loopback", callbacks=[Asks()], checkpoint=tmp_path,
        evaluate=[_batch(50)], log="none", ahead=True,
    )  # fmt: skip
    assert begun == [2, 3, 4, 5]
    assert training.stopped and training.saved and training.evaluation is None


def test_only_where_nobody_has_to_agree(job: piper.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="ahead=1"):
        piper.train(job, _batches(), launch="loopback", log="none", ahead=1)  # type: ignore[arg-type]
    with job.launch("loopback") as run:
        monkeypatch.setattr(type(run.workers.pool), "reading", "rank")
        with pytest.raises(RunError, match="ahead=True under torchrun"):
            piper.train(run, _batches(), log="none", ahead=True)
