"""Training that goes on: at the next sample, under another number of data ranks and size of batches."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import piper
from piper.errors import RunError
from piper.stored.folders import checkpoints
from piper.training.position import Position
from piper.training.progress import Progress
from tests import counted
from tests.counted import GIVEN, NUM

Part = tuple[int, int, int, Any]  # data ranks, size of batches, steps, data


def _trained(*parts: Part) -> tuple[torch.Tensor, piper.Training]:
    """On how many samples of each number all parts trained, one after another by way of JSON."""
    found, progress, training = torch.zeros(NUM), Progress(), None
    for dp, size, steps, data in parts:
        with counted.job(dp, size).launch("loopback") as run:
            done = progress.position.steps
            training = piper.train(run, data, steps=done + steps, start=progress, log="none")
            found += counted.counts(run, size)
        assert training.position.steps == done + steps
        assert [record.step for record in training.records] == list(range(1, done + steps + 1))
        saved = Progress(position=training.position, records=tuple(training.records))
        progress = Progress.from_json(saved.to_json())
        assert progress == saved
    assert training is not None
    return found, training


SAME = [counted.kept_8, counted.of_8, counted.begun_8, counted.plain_8, counted.stateful_8]
OTHER = [(counted.of_8, counted.of_4), (counted.begun_8, counted.begun_4)]


@pytest.mark.parametrize("data", SAME)
@pytest.mark.parametrize("steps", [2, 5, 7, 10])
def test_each_sample_is_trained_on_once_an_epoch(data: Any, steps: int) -> None:
    found, training = _trained((2, 8, steps, data), (4, 8, 15 - steps, data))
    assert found.tolist() == [3.0] * NUM
    assert training.position.samples == 3 * NUM


@pytest.mark.parametrize(("data", "other"), OTHER)
def test_batches_of_another_size_go_on_at_the_sample(data: Any, other: Any) -> None:
    found, _ = _trained((2, 8, 7, data), (1, 4, 1, other), (4, 4, 3, other), (2, 8, 1, data))
    assert found.sum() == 80 and found.tolist() == [2.0] * NUM


@pytest.mark.parametrize("data", SAME)
def test_checkpoints_go_on_at_the_sample(data: Any, tmp_path: Path) -> None:
    for dp, steps in ((2, 7), (2, 9), (4, 15)):
        piper.train(
            counted.job(dp, 8), data, steps=steps, launch="loopback", log="none",
            checkpoint=tmp_path, resume=True,
        )  # fmt: skip
    with counted.job(1, 8).resume(checkpoints(tmp_path)[-1], "single") as run:
        assert counted.counts(run, 8).tolist() == [3.0] * NUM


def test_dropped_batches_are_whole_ones() -> None:
    found, _ = _trained((2, 8, 3, counted.plain_8), (2, 4, 4, counted.plain_4))
    assert found.tolist() == [1.0] * NUM
    with pytest.raises(
        RunError, match="12 samples were trained on, where no batch of the data ends"
    ):
        _trained((2, 4, 3, counted.plain_4), (2, 8, 3, counted.plain_8))


@pytest.mark.parametrize("kind", GIVEN)
def test_global_batches_go_on_after_those_that_were_trained_on(kind: str) -> None:
    make = GIVEN[kind]
    found, _ = _trained((1, 8, 2, make()), (2, 8, 3, make()))
    assert found.tolist() == [1.0] * NUM


def test_a_loader_of_global_batches_takes_another_size_and_reads_nothing_twice() -> None:
    counted.Numbers.read.clear()
    found, training = _trained((1, 8, 2, counted.loader(8)), (2, 4, 6, counted.loader(4)))
    assert found.tolist() == [1.0] * NUM and len(counted.Numbers.read) == NUM
    start = Progress(position=training.position)
    with pytest.raises(RunError, match="the data ended after 8 of 9 steps"):
        piper.train(
            counted.job(1, 4), counted.loader(4), steps=9, start=start, launch="single", log="none"
        )


def test_a_loader_with_a_state_is_given_it_and_makes_no_batch_again() -> None:
    counted.Stateful.made = 0
    found, training = _trained((2, 8, 3, counted.stateful_8), (2, 8, 2, counted.stateful_8))
    assert found.tolist() == [1.0] * NUM and counted.Stateful.made == 2 * 5
    assert len(training.position.states) == 2 and not training.position.whole
    assert training.position.epoch is None
    # Other data ranks: by samples.
    _trained((2, 8, 3, counted.stateful_8), (4, 8, 2, counted.stateful_8))
    assert counted.Stateful.made == 2 * 5 + 2 * 3 + 4 * 5


def _two(share: piper.Share) -> Iterator[dict[str, torch.Tensor]]:
    """Half of each batch from one loader, half from another."""
    one, other = (share.of(counted.loader(4)) for _ in range(2))
    for batch, more in zip(one, other, strict=True):
        yield {"ids": torch.cat([batch["ids"], more["ids"]])}


def test_several_loaders_at_a_time_are_read_again_and_dropped() -> None:
    whole, _ = _trained((2, 8, 6, _two))
    parts, training = _trained((2, 8, 2, _two), (2, 8, 4, _two))
    assert parts.tolist() == whole.tolist() and training.position.mixed


def test_the_position_is_that_of_the_last_batch_that_was_trained_on() -> None:
    from piper.training.data import Batches

    with counted.job(2, 8).launch("loopback") as run:
        batches = Batches(run, counted.stateful_8)
        for _ in range(2):
            run.step(next(batches))
            batches.trained()
        at = batches.position()
        next(batches)  # read, and not trained on
        ahead = batches.position()
    assert (at.steps, at.samples, len(at.states)) == (2, 16, 2)
    assert (ahead.steps, ahead.samples, ahead.states) == (2, 16, ())
    assert Position.from_json(at.to_json()) == at


def _every_third(optimizer: Any) -> Any:
    return StepLR(optimizer, 3, 0.5)


def test_learning_rates_go_on_with_the_steps() -> None:
    data, job = counted.of_8, counted.job(1, 8)
    options: dict[str, Any] = {"lr_schedule": _every_third, "launch": "single", "log": "none"}
    whole = piper.train(job, data, steps=8, **options)
    assert len({record.lr for record in whole.records}) == 3
    first = piper.train(job, data, steps=4, **options)
    start = Progress(position=first.position, records=tuple(first.records))
    second = piper.train(job, data, steps=8, start=start, **options)
    assert [r.lr for r in second.records] == [r.lr for r in whole.records]
    with pytest.raises(RunError, match="ReduceLROnPlateau looks at the loss"):
        piper.train(
            job, data, steps=8, start=start, **{**options, "lr_schedule": ReduceLROnPlateau}
        )


def test_training_that_is_done_is_not_done_again() -> None:
    _, training = _trained((1, 8, 4, counted.of_8))
    start = Progress(position=training.position, records=tuple(training.records), seconds=7.0)
    again = piper.train(
        counted.job(1, 8), counted.of_8, steps=4, start=start, launch="single", log="none"
    )
    assert again.losses == training.losses and again.seconds >= 7.0
    assert again.position == training.position


def test_data_that_is_shorter_than_the_position_is_refused() -> None:
    start = Progress(position=Position(steps=6, samples=48))
    short = [{"ids": torch.arange(8)}] * 2
    with pytest.raises(RunError, match="the data ends after 16 samples, but 48 were trained on"):
        piper.train(counted.job(1, 8), short, steps=7, start=start, launch="single", log="none")


def test_the_page_shows_data_that_goes_on() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"dataset": counted.Numbers()}
    exec(compile(code.replace("batch_size=64", "batch_size=8"), "data.md", "exec"), names)
    found, _ = _trained((2, 8, 7, names["data"]), (4, 8, 3, names["data"]))
    assert found.tolist() == [2.0] * NUM
