"""Epochs of data that ends, and batches at their ends that are smaller than others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import piper
from piper.errors import RunError
from piper.strategies import parallel
from piper.training.progress import Progress

ROWS = 22  # in batches of 8: 8, 8 and 6
SAMPLES = [
    {"x": torch.randn(4, generator=torch.Generator().manual_seed(n)).double(), "n": n}
    for n in range(ROWS)
]


def _collated(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        "n": torch.tensor([sample["n"] for sample in samples]),
    }


def _loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_size=8, shuffle=shuffle, collate_fn=_collated)  # type: ignore[arg-type]


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return (model(batch["x"]) - batch["n"][:, None]).square().mean()


def _job(**degrees: Any) -> piper.Job:
    program = piper.trace(lambda: nn.Linear(4, 2).double(), _collated(SAMPLES[:8]), _step)
    return program.apply(parallel(**degrees)).lower(optimizer=piper.adamw(lr=0.1), seed=3)


def data(share: piper.Share) -> Iterator[Any]:
    yield from share.of(_loader())


def endless(share: piper.Share) -> Iterator[Any]:
    while True:
        yield from share.of(_loader())


def _train(job: piper.Job, given: Any, **options: Any) -> piper.Training:
    return piper.train(job, given, launch="loopback", **options)


def _orders(epochs: int) -> list[list[int]]:
    """The samples of all batches, as a share of one of one reads them."""
    share, found = piper.Share(0, 1, seed=3), []
    for _ in range(epochs):
        found += [batch["n"].tolist() for batch in share.of(_loader())]
    return found


def test_every_batch_of_every_epoch_is_a_step() -> None:
    job, batches = _job(dp=2), [_collated([SAMPLES[n] for n in order]) for order in _orders(3)]
    assert [len(batch["n"]) for batch in batches] == [8, 8, 6] * 3
    assert batches[0]["n"].tolist() != batches[3]["n"].tolist()
    with job.launch("loopback") as run:
        losses = [run.step(batch).loss for batch in batches]
    for given in (_loader(), data):
        training = _train(job, given, epochs=3)
        assert training.losses == losses
        assert training.position.samples == 3 * ROWS


def test_a_smaller_batch_trains_like_one_device() -> None:
    job = _job(dp=2)
    model = nn.Linear(4, 2).double()
    with job.launch("loopback") as run:
        model.load_state_dict(run.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [_collated(SAMPLES[begin : begin + 8]) for begin in range(0, ROWS, 8)]
    with job.launch("loopback") as run:
        for batch in batches * 2:
            optimizer.zero_grad()
            loss = _step(model, batch)
            loss.backward()
            assert run.step(batch).loss == pytest.approx(loss.item(), rel=1e-12)
            optimizer.step()
        for name, param in run.parameters().items():
            torch.testing.assert_close(param, model.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("given", [_loader(False), data, None], ids=["loader", "data", "list"])
@pytest.mark.parametrize("degrees", [{"dp": 2, "microbatches": 2}, {"dp": 4}], ids=["mb", "dp"])
def test_a_last_batch_that_does_not_divide_is_left_out_aloud(
    given: Any, degrees: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    given = list(_loader(False)) if given is None else given
    training = _train(_job(**degrees), given, epochs=2)
    # What was left out counts once something behind it was read.
    assert len(training.losses) == 4 and training.position.samples == ROWS + 16
    printed = capsys.readouterr().out
    ranks, pieces = degrees["dp"], degrees.get("microbatches", 1)
    text = f"a batch of 6 samples was left out: does not divide into {ranks} data ranks x {pieces} "
    # The first is said with the step behind it, the second at the end.
    assert printed.count(f"warning: step 3: {text}") == 1
    assert printed.count(f"warning: step 4: {text}") == 1


def test_all_smaller_batches_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    job = _job(dp=2)
    training = _train(job, _loader(), epochs=2, last="drop")
    orders = [order for order in _orders(2) if len(order) == 8]
    with job.launch("loopback") as run:
        losses = [run.step(_collated([SAMPLES[n] for n in order])).loss for order in orders]
    assert training.losses == losses
    assert capsys.readouterr().out.count('a batch of 6 samples was left out: last="drop"') == 2


def test_an_evaluation_takes_smaller_batches(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"evaluate": _loader(False), "evaluate_every": 1, "steps": 1}
    even, uneven = (_train(_job(dp=2, microbatches=num), _loader(), **options) for num in (1, 2))
    assert even.evaluation is not None and uneven.evaluation is not None
    assert even.evaluation != pytest.approx(uneven.evaluation)
    printed = capsys.readouterr().out
    assert printed.count("the evaluation leaves out a batch of 6 samples") == 1


@pytest.mark.parametrize("given", [_loader(), data], ids=["loader", "data"])
@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_epochs_go_on_where_they_stopped(given: Any, done: int) -> None:
    for degrees in ({"dp": 2}, {"dp": 4}):
        job = _job(**degrees)
        whole = _train(job, given, epochs=3, log="none")
        with job.launch("loopback") as run:
            first = piper.train(run, endless, steps=done, log="none")
            start = Progress(position=first.position, records=tuple(first.records))
            both = piper.train(run, given, epochs=3, start=start, log="none")
        assert both.losses == whole.losses and both.position == whole.position


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 2, "steps": 3}, "steps=3 and epochs=2"),
        ({"epochs": 1, "last": "pad"}, "last='pad'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        _train(_job(), _loader(), **options)


def test_data_that_ends_once_has_one_epoch() -> None:
    with pytest.raises(RunError, match="the data can be read only once"):
        _train(_job(), iter(_loader()), epochs=2)
    assert len(_train(_job(), iter(_loader()), epochs=1).losses) == 3


def test_data_without_any_batch_that_fits_is_an_error() -> None:
    small = [_collated(SAMPLES[:3])] * 4
    with pytest.raises(RunError, match="all batches of the data are smaller"):
        _train(_job(dp=2), small, epochs=2)
