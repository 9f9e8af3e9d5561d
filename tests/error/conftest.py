"""Where the programs of mistakes lie, for the tests that run them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs import `_model` and `_first`; none of them stays imported."""
    monkeypatch.chdir(HERE / "scripts")
    monkeypatch.syspath_prepend(str(HERE / "programs"))
    monkeypatch.syspath_prepend(str(HERE / "scripts"))
    before, environment = set(sys.modules), dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - before:
        if str(HERE) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
