"""Saves that fail, states that are hard to save, and old checkpoints that cannot be removed."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import piper
from piper.api.job import Job
from piper.cli.main import main
from piper.errors import RunError
from piper.runtime.launch.marks import decoded, encoded
from piper.runtime.state.audit import audit
from piper.stored import folders
from piper.stored.folders import checkpoints, found_in
from tests.procs import tiny

TERMINATED = 143
UNSAVED = 1
DATA = [tiny.batch(number) for number in range(20)]


def _job(lr: Any = 0.2) -> Job:
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.5)
    return piper.trace(tiny.model, tiny.batch(), tiny.step).lower(optimizer=optimizer)


def _trained(folder: Path, steps: int, **options: Any) -> piper.Training:
    settings = {"launch": "loopback", "log": "none", "checkpoint": folder, **options}
    return piper.train(_job(), DATA, steps=steps, **settings)


def _full_after(folder: Path, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk full as soon as there are so many checkpoints."""
    import piper.runtime.state.write_pieces as written

    write = written._write_all

    def write_all(file: Any, data: memoryview) -> None:
        if len(checkpoints(folder)) >= num:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(written, "_write_all", write_all)


ASKED = """
    import os, signal
    from tests.procs.tiny import batch, model, optimizer, step

    def data(share):
        for number in range(100):
            if number == AT:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch(number)
"""


@pytest.mark.parametrize(
    ("num", "at"), [(0, 2), (1, 2), (1, 3)], ids=["none before", "one before", "one was due"]
)
def test_a_request_to_end_whose_save_fails(
    num: int,
    at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, folder = tmp_path / "asked.py", tmp_path / "run"
    file.write_text(textwrap.dedent(ASKED).replace("AT", str(at)))
    _full_after(folder, num, monkeypatch)
    every = ["--every", "2"] if num else []
    command = ["train", str(file), "--launch", "loopback", "--json", "--steps", "100"]
    assert main([*command, "--checkpoint", str(folder), *every]) == TERMINATED
    printed = capsys.readouterr()
    events = [json.loads(line) for line in printed.out.splitlines()]
    last = max(event["step"] for event in events if event["event"] == "step")
    [warning] = [event["text"] for event in events if event["event"] == "warning"]
    assert warning.startswith("no checkpoint: ") and "No space left on device" in warning
    assert warning.endswith("; the last one is of step 2" if num else "; there is none")
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert f"asked to end: stopped after step {last}, which is not saved" in notes
    assert "Traceback" not in printed.err
    names = [path.name for path in folder.iterdir()]
    assert names == ["step-00000002"] * num, "what failed leaves nothing, what was there stays"
    if num:
        path, manifest = found_in(folder)
        assert audit(manifest.state(path)) == []


@pytest.mark.parametrize("num", [0, 1], ids=["none before", "one before"])
def test_a_last_save_that_fails_is_an_exit_code(
    num: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    _full_after(folder, num, monkeypatch)
    command = ["train", tiny.__file__, "--launch", "loopback", "--steps", "3", "--every", "2"]
    assert main([*command, "--checkpoint", str(folder)]) == UNSAVED
    assert "No space left on device" in capsys.readouterr().out
    assert len(checkpoints(folder)) == num
    monkeypatch.undo()
    assert main([*command, "--checkpoint", str(folder), "--resume"]) == 0
    assert _trained(tmp_path / "another", 2).saved
    assert _trained(tmp_path, 2, checkpoint=None).saved is None


class _Numpy(LRScheduler):
    """Keeps numbers and an array of numpy, and sets learning rates that are numpy's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = np.float32(0.9)
        self.seen = np.zeros(30)
        self.count = np.int64(0)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen[self.count] = self.base_lrs[0] * float(self.factor) ** int(self.count)
        self.count = self.count + np.int64(1)
        return [self.seen[self.count - 1] for _ in self.base_lrs]


def test_a_schedule_of_numpy_numbers_goes_on(tmp_path: Path) -> None:
    whole = _trained(tmp_path / "whole", 8, lr_schedule=_Numpy)
    _trained(tmp_path / "run", 4, lr_schedule=_Numpy)
    found = _trained(tmp_path / "run", 8, lr_schedule=_Numpy, resume=True)
    assert [r.lr for r in found.records] == [r.lr for r in whole.records]
    assert [r.loss for r in found.records] == [r.loss for r in whole.records]
    assert len({record.lr for record in found.records}) == 8


def test_numbers_of_numpy_are_options_of_optimizers() -> None:
    (group,) = _job(np.float32(0.25)).plan.param_groups
    assert group.options["lr"] == 0.25 and type(group.options["lr"]) is float


def test_states_keep_their_types() -> None:
    state = {"number": np.float32(0.1), "array": np.arange(6).reshape(2, 3), "pair": (1, None)}
    found = decoded(encoded(state))
    assert found["number"] == state["number"] and type(found["number"]) is np.float32
    assert np.array_equal(found["array"], state["array"]) and found["array"].dtype == np.int64
    assert found["pair"] == (1, None)


def test_a_state_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(RunError) as refused:
        encoded({"epoch": 3, "parts": [{}, {"made by": Path}]})
    assert str(refused.value).splitlines()[0] == (
        "the state_dict() of a loader or scheduler cannot be saved: ['parts'][1]['made by'] is a type"
    )


class _Unsaveable(_Numpy):
    def state_dict(self) -> dict[str, Any]:
        return {"made by": Path}


def test_a_schedule_that_cannot_be_saved_is_an_error_at_once(tmp_path: Path) -> None:
    seen: list[int] = []
    callback = SimpleNamespace(on_step=lambda record: seen.append(record.step))
    with pytest.raises(RunError, match="of a loader or scheduler cannot be saved"):
        _trained(tmp_path / "run", 8, lr_schedule=_Unsaveable, callbacks=[callback])
    assert seen == [1]
    assert len(_trained(tmp_path, 8, lr_schedule=_Unsaveable, checkpoint=None).records) == 8


PLATEAU: Callable[[Any], Any] = partial(ReduceLROnPlateau, patience=0, threshold=0.5)


def test_a_plateau_is_not_known_to_what_a_run_saved_by_itself(tmp_path: Path) -> None:
    with _job().launch("loopback") as run:
        run.save(tmp_path / "begun" / "step-00000000")
        run.step(DATA[0])
        run.save(tmp_path / "run" / "step-00000001")
    with pytest.raises(
        RunError, match=r"losses of all steps, .*\n  legal: a checkpoint that piper"
    ):
        _trained(tmp_path / "run", 4, lr_schedule=PLATEAU, resume=True)
    whole = _trained(tmp_path / "whole", 4, lr_schedule=PLATEAU)
    begun = _trained(tmp_path / "begun", 4, lr_schedule=PLATEAU, resume=True)
    _trained(tmp_path / "parts", 2, lr_schedule=PLATEAU)
    parts = _trained(tmp_path / "parts", 4, lr_schedule=PLATEAU, resume=True)
    for found in (begun, parts):
        assert [record.lr for record in found.records] == [record.lr for record in whole.records]
    assert len({record.lr for record in whole.records}) > 1


def test_old_checkpoints_that_cannot_be_removed_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(source: Any, target: Any) -> None:
        if os.fspath(target).endswith(".removed") and "step-00000002" in os.fspath(source):
            raise PermissionError(13, "Permission denied")
        moved(source, target)

    moved = os.rename
    monkeypatch.setattr(folders.os, "rename", rename)
    found = _trained(tmp_path / "run", 10, checkpoint_every=2, keep=1, log="json")
    assert len(found.records) == 10
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    [warning] = [event["text"] for event in events if event["event"] == "warning"]
    old = tmp_path / "run" / "step-00000002"
    assert warning == f"{old} cannot be removed: Permission denied; training goes on"
    left = [path.name for path in checkpoints(tmp_path / "run")]
    assert left == ["step-00000002", "step-00000010"], "others are removed all the same"
