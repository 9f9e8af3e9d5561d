"""What is no path, and what is no set of options by patterns: one error with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.errors import ArgumentError, FileError, RunError
from tests.zoo import batches_of, program_of

NO_PATHS = (3, None, b"plan.json", "plan\0.json")


@pytest.fixture(scope="module")
def job() -> piper.Job:
    return program_of("deep").lower()


CALLS: list[tuple[str, Callable[[piper.Job, Any], object]]] = [
    ("job.save", lambda job, path: job.save(path)),
    ("job.resume", lambda job, path: job.resume(path, "loopback")),
    ("load_job", lambda job, path: piper.load_job(path)),
    ("program.save", lambda job, path: program_of("deep").save(path)),
    ("load_program", lambda job, path: piper.load_program(path)),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_what_is_no_path_is_refused_with_the_line(
    job: piper.Job, name: str, call: Callable[[piper.Job, Any], object]
) -> None:
    for given in NO_PATHS:
        with pytest.raises(FileError, match="is no path") as caught:
            call(job, given)
        assert str(caught.value).startswith(f"{name} (tests/null/test_given_paths.py:")


def test_folders_and_files_of_a_run(job: piper.Job, tmp_path: Path) -> None:
    given: Any = 3
    with job.launch("loopback") as run:
        for call in (run.save, run.save_weights):
            with pytest.raises(FileError, match=rf"run\.{call.__name__} \(.*: 3 is no path"):
                call(given)
        for training in (3, {"tensor": torch.ones(1)}):
            with pytest.raises(RunError, match=r"run\.save \(.*\): training="):
                run.save(tmp_path / "saved", training=training)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())
    for option in ("checkpoint", "record"):
        with pytest.raises(FileError, match=r"train \(.*\): 3 is no path"):
            piper.train(job, batches_of("deep"), steps=1, launch="loopback", **{option: given})


@pytest.mark.parametrize("make", [piper.adamw, piper.sgd])
@pytest.mark.parametrize("groups", [3, None, [1], ["a"], {"a": 3}, {3: {}}, {"a": {3: 1}}], ids=str)
def test_groups_that_are_no_patterns_are_refused_with_the_line(make: Any, groups: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(lr=1e-3, groups=groups)
    assert str(caught.value).startswith(f"{make.__name__} (tests/null/test_given_paths.py:")
    assert "groups=" in str(caught.value)
