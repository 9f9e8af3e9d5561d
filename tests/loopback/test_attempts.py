"""Attempts of an elastic training: which losses it survives, when it grows, and what callbacks hear."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.errors import RankLost
from piper.strategies import parallel
from tests.heard import Heard
from tests.procs import tiny

DATA = [tiny.batch(number) for number in range(20)]


@cache
def _job(ranks: int) -> Job:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.5)
    return program.apply(parallel(dp=ranks, microbatches=2 // ranks)).lower(optimizer=optimizer)


def _train(folder: Path, *callbacks: Any, steps: int = 8, **options: Any) -> piper.Training:
    elastic = piper.Elastic(_job, ranks=2, available=options.pop("available", None))
    return piper.train(
        elastic, DATA, steps=steps, launch="loopback", log="none",
        checkpoint=folder, callbacks=callbacks, **options,
    )  # fmt: skip


class _Loses(Heard):
    """Loses a rank in steps that `when` says, by the step and how often it was taken."""

    def __init__(self, when: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.when = when

    def on_step(self, record: Any) -> None:
        super().on_step(record)
        taken = [one.step for one in self.of("step")].count(record.step)
        if self.when(record.step, taken):
            raise RankLost("rank 1 was lost", ranks=[1], survivors=[])


def test_a_loss_that_comes_back_at_the_same_step_is_an_error(tmp_path: Path) -> None:
    loses = _Loses(lambda step, taken: step == 6 and taken < 10)
    with pytest.raises(RankLost, match="rank 1 was lost"):
        _train(tmp_path, loses, checkpoint_every=4, available=lambda: 2)
    assert len(loses.of("start")) == 4
    assert len(loses.of("failure")) == 1, "the losses before it were survived"


def test_losses_with_a_new_step_between_them_are_survived(tmp_path: Path) -> None:
    loses = _Loses(lambda step, taken: taken == 1)
    found = _train(tmp_path, loses, checkpoint_every=4, available=lambda: 2)
    assert [record.step for record in found.records] == list(range(1, 9))
    assert len(loses.of("start")) == 9
    assert loses.of("failure") == [] and loses.of("end") == [found]


def test_too_few_ranks_after_a_loss_are_a_failure(tmp_path: Path) -> None:
    left = iter([2, 0])
    loses = _Loses(lambda step, taken: step == 2)
    with pytest.raises(piper.PiperError, match="no strategy for 0 ranks") as caught:
        _train(tmp_path, loses, available=lambda: next(left))
    assert loses.of("failure") == [caught.value]


def test_training_grows_when_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import piper.runtime.state.write_pieces as written

    write, heard = written._write_all, Heard()

    def write_all(file: Any, data: memoryview) -> None:
        if len(heard.of("step")) == 4:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(written, "_write_all", write_all)
    found = _train(
        tmp_path, heard, steps=12, checkpoint_every=4,
        available=lambda: 2 if heard.of("step") else 1,
    )  # fmt: skip
    starts = [(start["step"], start["ranks"]) for start in heard.of("start")]
    assert starts == [(0, 1), (8, 2)] and found.saved
    assert [record.step for record in heard.of("step")] == list(range(1, 13))


def test_training_that_cannot_grow_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import piper.runtime.state.write_pieces as written

    def write_all(file: Any, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(written, "_write_all", write_all)
    heard = Heard()
    found = _train(
        tmp_path, heard, checkpoint_every=4, available=lambda: 2 if heard.of("step") else 1
    )
    assert [start["ranks"] for start in heard.of("start")] == [1]
    assert len(found.records) == 8 and found.saved is False
