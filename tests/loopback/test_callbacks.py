"""Callbacks: what they are told, and what becomes of one that raises."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import piper
from piper.errors import FileError, RunError
from piper.training.position import Position
from piper.training.progress import Progress
from tests import counted
from tests.heard import Heard

BATCHES = [{"ids": torch.arange(i, i + 8)} for i in range(0, 32, 8)]


def _train(*callbacks: Any, steps: int = 3, data: Any = BATCHES, **options: Any) -> piper.Training:
    return piper.train(
        counted.job(1, 8), data, steps=steps, launch="single", callbacks=callbacks,
        **{"log": "none", "evaluate": BATCHES[:1], "evaluate_every": 2, **options},
    )  # fmt: skip


def test_a_callback_is_told_of_everything_in_order() -> None:
    heard = Heard()
    training = _train(heard)
    events = [event for event, _ in heard.events]
    assert events == ["start", "step", "step", "evaluation", "step", "evaluation", "end"]
    (start,) = heard.of("start")
    plan = counted.job(1, 8).plan
    assert start["step"] == 0 and start["steps"] == 3 and start["plan"] == plan.content_hash()
    assert [record.loss for record in heard.of("step")] == training.losses
    evaluated = [record for record in training.records if record.evaluation is not None]
    assert heard.of("evaluation") == evaluated and heard.of("end") == [training]


def test_an_object_with_one_method_is_a_callback() -> None:
    seen: list[int] = []
    _train(SimpleNamespace(on_step=lambda record: seen.append(record.step)))
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            SimpleNamespace(on_steps=print),
            r"on_steps would never be called \(did you mean 'on_step'",
        ),
        (piper.Callback, r"the callback Callback is a class\n  legal: Callback\(\)"),
        (print, "is no callback"),
    ],
)
def test_what_is_no_callback_is_refused(callback: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        _train(callback)


class Raising(piper.Callback):
    def on_step(self, record: Any) -> None:
        if record.step == 2:
            {}["missing"]


class RaisingTwice(Raising):
    def on_failure(self, error: BaseException) -> None:
        raise OSError("disk full")


def test_a_callback_that_raises_is_one_error_with_its_line() -> None:
    heard = Heard()
    with pytest.raises(RunError) as caught:
        _train(heard, Raising())
    line = Raising.on_step.__code__.co_firstlineno + 2
    file = "tests/loopback/test_callbacks.py"
    assert str(caught.value) == f"Raising.on_step ({file}:{line}): KeyError: 'missing'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(heard.of("step")) == 2 and heard.of("failure") == [caught.value]


def test_a_failure_stays_the_error_whatever_a_callback_makes_of_it() -> None:
    with pytest.raises(RunError, match="KeyError: 'missing'") as caught:
        _train(RaisingTwice())
    (note,) = caught.value.__notes__
    assert re.match(r"then RaisingTwice.on_failure \(.*\): OSError: disk full", note)


def test_json_lines_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    training = _train(piper.JsonLines(path))
    start = Progress(position=Position(steps=3, samples=24))
    with pytest.raises(RunError, match="the data ended after 4 of 5 steps"):
        _train(piper.JsonLines(path), steps=5, start=start)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines[:7]] == [
        "start", "step", "step", "evaluation", "step", "evaluation", "end"
    ]  # fmt: skip
    assert [line["loss"] for line in lines if line["event"] == "step"][:3] == training.losses
    evaluation = {"step": 2, "loss": training.records[1].evaluation, "metrics": {}}
    assert lines[3] == {"event": "evaluation", **evaluation}
    assert [(line["event"], line.get("step")) for line in lines[7:]] == [
        ("start", 3), ("step", 4), ("evaluation", 4), ("failure", None)
    ]  # fmt: skip
    assert lines[-1]["error"].startswith("RunError: train (")
    with pytest.raises(FileError, match="cannot be written: Is a directory"):
        _train(piper.JsonLines(tmp_path))


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = _train(piper.TensorBoard(tmp_path))
    # It goes on after step 2, so that step 3 is another one now.
    again = _train(
        piper.TensorBoard(tmp_path),
        steps=4,
        start=Progress(position=Position(steps=2, samples=16)),
    )
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    points = {point.step: point.value for point in found.Scalars("train/loss")}
    losses = training.losses[:2] + again.losses
    assert points == pytest.approx(dict(enumerate(losses, 1)))
    assert {point.step for point in found.Scalars("evaluation/loss")} == {2, 4}
    assert "train/norm" not in found.Tags()["scalars"]  # without clipping there is none


def test_tensorboard_that_is_missing_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"^TensorBoard is not installed\n  legal: pip install"):
        _train(piper.TensorBoard(tmp_path))


def test_the_page_shows_callbacks_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
    _, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    logged: list[Any] = []
    run = SimpleNamespace(
        log=lambda facts, step: logged.append((step, facts["loss"])),
        finish=lambda exit_code=0: logged.append(exit_code),
    )
    wandb = ModuleType("wandb")
    wandb.init = lambda project, config: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names: dict[str, Any] = {}
    exec(compile(code, "callbacks.md", "exec"), names)
    training = _train(names["WandB"]())
    assert logged == [*enumerate(training.losses, 1), 0]
    with pytest.raises(RunError):
        _train(names["WandB"](), steps=5)
    assert logged[-1] == 1
    methods = re.findall(r"^\| `(on_\w+)\(", page, re.M)
    assert methods == [name for name in vars(piper.Callback) if name.startswith("on_")]


def test_runs_and_trainings_are_short_where_they_are_shown() -> None:
    with counted.job(2, 8).launch("loopback") as run:
        training = piper.train(run, counted.of_8, steps=3, log="none")
        plan = run.plan.content_hash()
        assert repr(run) == f"<Run of plan {plan}: 2 ranks (dp=2) on cpu>"
    assert repr(run).endswith(", closed>")
    assert re.fullmatch(r"<Training: 3 steps in [\d.]+ s: loss .*>", repr(training))
