"""Data that raises: read again from the same sample, or left out on all ranks together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.cli.main import main
from piper.errors import RunError
from piper.runtime.launch import reader
from piper.training.progress import Progress
from tests import counted
from tests.counted import DAMAGED, NUM, Damaged


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "pause", lambda attempt: 0.0)
    Damaged.tries = 0


def _counts(data: Any, *, dp: int = 2, steps: int = 5, **options: Any) -> tuple[Any, Any]:
    with counted.job(dp, 8).launch("loopback") as run:
        training = piper.train(run, data, steps=steps, **{"log": "none", **options})
        return counted.counts(run, 8), training


AGAIN = [counted.twice_damaged, counted.twice_damaged_plain, counted.twice_damaged_begun]
GIVEN = {
    "loader": lambda: counted.damaged_loader(2),
    "stateful": lambda: counted.TwiceDamaged(piper.Share(0, 1)),
}


@pytest.mark.parametrize("data", AGAIN)
def test_what_fails_is_read_again_from_the_same_sample(data: Any) -> None:
    found, training = _counts(data, steps=10, read_again=2)
    assert found.tolist() == [2.0] * NUM and Damaged.tries > 2
    assert sum(record.retried for record in training.records) == 2 and training.skipped == 0


def test_global_batches_are_read_again() -> None:
    for make in GIVEN.values():
        Damaged.tries = 0
        found, training = _counts(make(), read_again=2)
        assert found.tolist() == [1.0] * NUM
        assert sum(record.retried for record in training.records) == 2


@pytest.mark.parametrize("read_again", [0, 1])
def test_what_fails_more_often_ends_the_training_as_it_was_raised(read_again: int) -> None:
    for data in (*AGAIN, GIVEN["loader"](), GIVEN["stateful"]()):
        Damaged.tries = 0
        with pytest.raises(OSError, match="block 7 is damaged"):
            _counts(data, read_again=read_again)


@pytest.mark.parametrize("data", [counted.damaged, counted.damaged_begun])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_batch_that_cannot_be_read_is_left_out_everywhere(data: Any, dp: int) -> None:
    found, training = _counts(data, dp=dp, steps=8, skip_unreadable=2)  # of 10 in two epochs
    assert found[DAMAGED] == 0 and found.sum() == 64 and training.skipped == 2
    assert training.position.samples == 2 * NUM and training.position.steps == 8
    order = _order(data, epochs=2)
    left_out = torch.zeros(NUM)
    for batch in order:
        if DAMAGED in batch:
            left_out[batch] += 1
    assert (found + left_out).tolist() == [2.0] * NUM


def _order(data: Any, *, epochs: int) -> list[list[int]]:
    """The global batches, read where nothing is damaged."""
    whole = {counted.damaged: counted.of_8, counted.damaged_begun: counted.begun_8}[data]
    batches = iter(whole(piper.Share(0, 1, seed=3)))
    return [next(batches)["ids"].tolist() for _ in range(epochs * NUM // 8)]


def test_it_is_tried_again_first_and_training_goes_on_behind_it() -> None:
    first, training = _counts(counted.damaged, steps=3, read_again=1, skip_unreadable=1)
    start = Progress(position=training.position)
    second, more = _counts(counted.damaged, steps=4, read_again=1, skip_unreadable=1, start=start)
    total = (first + second).tolist()
    assert total[DAMAGED] == 0 and sorted(total) == [0.0] * 8 + [1.0] * 32
    assert training.skipped + more.skipped == 1
    assert sum(record.retried for record in training.records + more.records) == 1


def test_processes_of_a_loader_that_fail_are_told_of_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, training = _counts(
        counted.damaged_loader(10**6, num_workers=1), steps=4, dp=1, skip_unreadable=1, log="text"
    )
    assert sorted(found.tolist()) == [0.0] * 8 + [1.0] * 32 and training.skipped == 1
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warned) == 1 and warned[0].endswith("left out: rank 0: OSError: block 7 is damaged")


def test_a_function_that_cannot_begin_is_called_again() -> None:
    calls: list[int] = []

    def data(share: piper.Share) -> Any:
        calls.append(share.rank)
        if len(calls) < 3:
            raise ConnectionError("no answer")
        return counted.of_8(share)

    found, training = _counts(data, read_again=2)
    assert found.tolist() == [1.0] * NUM and training.records[0].retried == 2
    assert calls == [0, 0, 0, 1]


def test_what_fails_before_the_first_batch_begins_again_where_training_went_on() -> None:
    first, training = _counts(counted.of_8, steps=7)
    calls: list[int] = []

    def data(share: piper.Share) -> Any:
        calls.append(share.rank)
        for epoch in range(2):
            if epoch == 1 and len(calls) == 1:
                raise OSError("block 7 is damaged")  # behind an epoch that is left out
            yield from share.of(counted.loader(8))

    start = Progress(position=training.position)
    second, _ = _counts(data, dp=1, steps=10, read_again=1, start=start)
    assert (first + second).tolist() == [2.0] * NUM and len(calls) == 2


def test_a_loader_that_cannot_be_made_at_first_keeps_its_saved_state() -> None:
    calls: list[int] = []

    def data(share: piper.Share) -> Any:
        calls.append(share.rank)
        if len(calls) == 2:
            raise ConnectionError("no answer")
        made = counted.Stateful(share)
        made.first = torch.tensor(24 if len(calls) == 1 else 0)  # the order is the state's
        return made

    first, training = _counts(data, dp=1, steps=1)
    start = Progress(position=training.position)
    second, _ = _counts(data, dp=1, steps=2, read_again=1, start=start)
    assert first.nonzero().flatten().tolist() == list(range(24, 32))
    assert second.nonzero().flatten().tolist() == list(range(32, 40)) and len(calls) == 3


def test_data_to_evaluate_is_read_again_and_not_left_out() -> None:
    tries: list[int] = []

    class Evaluation:
        fails = 1

        def __iter__(self) -> Any:
            tries.append(len(tries))
            if len(tries) <= self.fails:
                raise OSError("block 7 is damaged")
            yield {"ids": torch.arange(8)}

    data = Evaluation()
    _, training = _counts(counted.of_8, dp=1, steps=1, evaluate=data, read_again=1)
    assert training.evaluation is not None and len(tries) == 2
    tries.clear()
    data.fails = 10
    with pytest.raises(OSError, match="block 7 is damaged"):
        _counts(counted.of_8, dp=1, steps=1, evaluate=data, read_again=1, skip_unreadable=1)
    assert len(tries) == 2


def test_more_than_may_be_left_out_is_an_error() -> None:
    with pytest.raises(
        RunError,
        match=r"a batch cannot be read, and 1 are left out already: rank \d: OSError: bl",
    ):
        _counts(counted.damaged, steps=8, skip_unreadable=1)


def test_data_that_cannot_go_on_behind_a_batch_says_so() -> None:
    for data in (counted.damaged_plain, counted.TwiceDamaged(piper.Share(0, 1))):
        Damaged.tries = 0
        with pytest.raises(
            RunError, match="OSError: block 7 is damaged; this data cannot be read on"
        ):
            _counts(data, skip_unreadable=1)


def test_the_log_says_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, training = _counts(
        counted.damaged, steps=4, dp=1, read_again=1, skip_unreadable=1, log="json"
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    warnings = [line["text"] for line in lines if line["event"] == "warning"]
    assert warnings == [
        "a batch before it was left out: rank 0: OSError: block 7 is damaged",
        "its data was read again, once",
    ]
    steps = [line for line in lines if line["event"] == "step"]
    assert sum(line["skipped"] for line in steps) == sum(line["retried"] for line in steps) == 1
    assert str(training).endswith(", 1 batch left out")


def test_data_that_is_read_only_once_is_refused() -> None:
    once = ({"ids": torch.arange(8)} for _ in range(5))
    with pytest.raises(RunError, match="data that can be read only once is not read again"):
        _counts(once, read_again=1)
    with pytest.raises(RunError, match="read_again=-1, skip_unreadable=0"):
        _counts(counted.damaged, read_again=-1)


FILE = """
import torch
from torch import nn

tries = []

def model():
    return nn.Linear(4, 4)

def batch():
    return torch.ones(8, 4)

def step(model, batch):
    return model(batch).square().mean()

def data(share):
    for number in range(share.start // 8, 9):
        tries.append(number)
        if number == 2 and tries.count(2) < 3 or number == 4:
            raise OSError("block 7 is damaged")
        yield batch()[share.rows(8)]
"""


def test_the_command_line_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "damaged.py"
    file.write_text(FILE)
    command = ["train", str(file), "--launch", "single", "--steps", "6"]
    assert main([*command, "--read-again", "2", "--skip-unreadable", "1"]) == 0
    printed = capsys.readouterr().out
    assert "warning: step 3: its data was read again, 2 times" in printed
    assert "warning: step 5: a batch before it was left out: rank 0: OSError: block 7" in printed
