"""Data that gives no batch for `timeout` seconds is named, whoever reads it."""

from typing import Any

import pytest

import piper
from piper.errors import RunError
from tests.procs import slow

pytestmark = pytest.mark.xdist_group("procs")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (slow.batches, r"train \(.*\): the generator hangs: no batch has come for 3 s"),
        (lambda: slow.loader(0), "the DataLoader hangs: no batch has come for 3 s"),
        (lambda: slow.loader(2), "the DataLoader hangs: no batch has come for 3 s"),
        (
            lambda: slow.data,
            r"ranks 0, 1 hang in data \(.*slow.py:\d+\): no batch has come for 3 s",
        ),
    ],
    ids=["iterable", "loader", "workers", "function"],
)
def test_data_that_blocks_is_named(make: Any, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        piper.train(slow.job(), make(), steps=5, launch="local", timeout=3, log="none")
    assert "launch(..., timeout=SECONDS)" in str(caught.value)


def test_an_interrupt_of_the_users_own_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        yield next(slow.batches())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        piper.train(slow.job(), interrupted(), steps=5, launch="local", timeout=3, log="none")
