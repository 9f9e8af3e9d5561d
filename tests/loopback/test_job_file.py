"""A job as a file: loaded without the model's code, it trains and evaluates to the same bits."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.bodies.files.body_fit import check_bodies
from piper.bodies.files.codec import content_hash
from piper.cli.main import main
from piper.errors import CheckError, PlanError
from piper.strategies import parallel
from tests.zoo import ADAMW, CASES, batches_of, program_of

pytestmark = pytest.mark.xdist_group("job_file")
FILE = str(Path(__file__).parents[1] / "procs" / "tiny.py")


@pytest.fixture(scope="module")
def job() -> Job:
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, microbatches=2, schedule="1f1b")
    return program_of("deep_dropout").apply(strategy).lower(optimizer=ADAMW, clip=1.0)


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.json"
    job.save(path)
    return path


def trained(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    *batches, held_out = batches_of("deep_dropout")
    with job.launch("loopback") as run:
        losses = [run.step(batch).loss for batch in batches]
        return [*losses, run.evaluate(held_out).loss], run.parameters()


def test_a_loaded_job_trains_and_evaluates_to_the_same_bits(job: Job, saved: Path) -> None:
    loaded = piper.load_job(saved)
    assert loaded.plan == job.plan and loaded.plan.content_hash() == job.plan.content_hash()
    assert loaded.evaluation().plan == job.evaluation().plan
    assert loaded.summary() == job.summary()
    assert loaded.diff(job) == ""
    losses, parameters = trained(job)
    again, others = trained(loaded)
    assert again == losses
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)
    again_saved = saved.with_name("again.json")
    loaded.save(again_saved)
    assert again_saved.read_bytes() == saved.read_bytes()


def test_a_loaded_job_has_no_program(saved: Path) -> None:
    loaded = piper.load_job(saved)
    for look in (lambda: loaded.graph, lambda: loaded.source, loaded.as_text):
        with pytest.raises(PlanError, match="read from a file, without its program"):
            look()


def test_one_without_its_evaluation(job: Job, tmp_path: Path) -> None:
    job.save(tmp_path / "job.json", evaluation=False)
    loaded = piper.load_job(tmp_path / "job.json")
    with pytest.raises(PlanError, match="saved without its evaluation"):
        loaded.evaluation()
    job.evaluation().save(tmp_path / "eval.json")
    with pytest.raises(PlanError, match="an evaluation itself"):
        piper.load_job(tmp_path / "eval.json").evaluation()


def _changed_body(file: Any) -> None:
    name = next(iter(file["code"]))
    file["code"][name] += " "


def _missing_body(file: Any) -> None:
    del file["code"][file["bodies"][0]]


def _no_bodies(file: Any) -> None:
    del file["code"]


def _other_body(file: Any) -> None:
    """Two chunks swap their code."""
    runs = [t for part in file["classes"] for t in part["tasks"] if t["kind"] == "run"]
    other = next(task for task in runs if len(task["inputs"]) != len(runs[0]["inputs"]))
    swapped = {runs[0]["body"]: other["body"], other["body"]: runs[0]["body"]}
    for task in runs:
        task["body"] = swapped.get(task["body"], task["body"])


def _other_body_unplanned(file: Any) -> None:
    """The same, and nothing says how their memory passes."""
    _other_body(file)
    file["inside"] = {}


def _replace_bodies(file: Any, change: Callable[[str], str]) -> None:
    """Bodies with other texts, under the names that those have."""
    names = {name: content_hash(change(text)) for name, text in file["code"].items()}
    text = json.dumps({**file, "code": {}})
    for name, new in names.items():
        text = text.replace(name, new)
    code = {names[name]: change(body) for name, body in file["code"].items()}
    file.clear()
    file.update(json.loads(text), code=code)


def _attack(file: Any) -> None:
    _replace_bodies(file, lambda text: text.replace('["aten.', '["torch.os:system",[]],["aten.', 1))


def _other_shapes(file: Any) -> None:
    """A view of other sizes: it would still be a body."""
    _replace_bodies(file, lambda text: text.replace("aten.mm.default", "aten.add.Tensor"))


def _dropped_waits(file: Any) -> None:
    for part in file["classes"]:
        for task in part["tasks"]:
            task["waits"] = []


def _other_optimizer(file: Any) -> None:
    file["param_groups"][0]["options"] = {"lr": [1.0, 2.0]}


def _other_evaluation(file: Any) -> None:
    file["evaluation"]["num_microbatches"] = 1


def _trained_evaluation(file: Any) -> None:
    file["evaluation"] = {k: v for k, v in file.items() if k not in ("evaluation", "code")}


REFUSED = {
    "is not what its name says": _changed_body,
    "is missing": _missing_body,
    "a plan without its bodies": _no_bodies,
    "makes or drops more than it is called with": _other_body,
    "takes .* and gives .* tensors, not": _other_body_unplanned,
    "a body may not call 'torch.os:system'": _attack,
    "body [0-9a-f]{16} ": _other_shapes,
    "does not wait for": _dropped_waits,
    "AdamW does not take": _other_optimizer,
    "the evaluation has another num_microbatches": _other_evaluation,
    "not one of training and its evaluation": _trained_evaluation,
}


PROVED = ("makes or drops more than it is called with", "does not wait for")


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str, saved: Path, tmp_path: Path) -> None:
    file = json.loads(saved.read_bytes())
    REFUSED[words](file)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(file))
    with pytest.raises(PlanError, match=words) as refused:
        piper.load_job(path)
    assert isinstance(refused.value, CheckError) == (words in PROVED)


@pytest.mark.parametrize("change", [_changed_body, _missing_body, _dropped_waits])
def test_check_looks_at_bodies_and_at_the_evaluation(
    change: Callable[[Any], None],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(saved)]) == 0
    file = json.loads(saved.read_bytes())
    change(file["evaluation"] if change is _dropped_waits else file)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(file))
    assert main(["check", str(path)]) == 2
    assert re.search("body [0-9a-f]{16} is|does not wait for", capsys.readouterr().err)


def test_numbers_in_a_body_stay_small(saved: Path, tmp_path: Path) -> None:
    """Squaring a number again and again, or repeating a list, would take all memory."""
    for bomb in (
        '["_operator:pow",[9,9000000000]]',
        '["_operator:mul",[[1,2],9000000000]]',
        '["_operator:mul",[9000000000,9000000000]]',
    ):
        file = json.loads(saved.read_bytes())
        _replace_bodies(file, lambda text, bomb=bomb: text.replace('["out"', f'{bomb},["out"', 1))
        path = tmp_path / "job.json"
        path.write_text(json.dumps(file))
        with pytest.raises(PlanError, match=r"no number|exponent|beyond 64 bits"):
            piper.load_job(path)


def test_the_command_line_trains_a_saved_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    degrees = ["--dp", "2", "--zero", "2", "--microbatches", "2"]
    assert main(["plan", FILE, *degrees, "--clip", "1", "--seed", "3", "-o", plan]) == 0
    run = ["--steps", "3", "--launch", "loopback", "--json"]
    capsys.readouterr()
    assert main(["train", FILE, *degrees, "--clip", "1", "--seed", "3", *run]) == 0
    whole = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["train", plan, "--data", FILE, *run]) == 0
    loaded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    losses = [[event["loss"] for event in events if "loss" in event] for events in (whole, loaded)]
    assert losses[0] == losses[1] and len(losses[0]) == 5  # steps, evaluation, end
    assert main(["check", plan]) == 0
    assert main(["diff", plan, plan]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no data"),
        (["--data", "none.py"], "there is no file none.py"),
        (["--data", FILE, "--pp", "2"], "--pp does not go with a saved plan"),
        (["--data", FILE, "--clip", "1"], "--clip does not go with a saved plan"),
        (["--data", FILE, "--nproc", "3"], "--nproc 3, but the strategy has 2 ranks"),
    ],
)
def test_what_the_command_line_refuses(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", FILE, "--dp", "2", "-o", plan]) == 0
    assert main(["train", plan, "--steps", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_plan_of_ours_fits_its_bodies(name: str) -> None:
    """Also where a tensor that is saved for the backward does not lie as a new one would."""
    schedule = ("1f1b", "zb_h1")[sorted(CASES).index(name) % 2]  # backwards whole, and in halves
    strategy = parallel(pp=CASES[name].num_stages, schedule=schedule, microbatches=2)
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW)
    check_bodies(job.plan, job.bodies)


@pytest.mark.parametrize("example", ["dense", "moe"])
def test_a_job_with_attention_comes_back(example: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"examples.{example}")
    program = piper.trace(module.model, module.batch(), module.step)
    job = program.apply(parallel(pp=2, dp=2, zero=2, microbatches=2)).lower(optimizer=ADAMW)
    job.save(tmp_path / "job.json")
    loaded = piper.load_job(tmp_path / "job.json")
    assert loaded.plan.content_hash() == job.plan.content_hash()
    with job.launch("loopback") as run, loaded.launch("loopback") as again:
        assert run.step(module.batch(1)).loss == again.step(module.batch(1)).loss


def test_plans_are_made_the_same_each_time() -> None:
    """Nothing goes by the order of a set: torchrun's ranks lower for themselves."""
    module = importlib.import_module("examples.moe")
    kept, hashes = [], set()
    for _ in range(5):
        program = piper.trace(module.model, module.batch(), module.step)
        kept.append(program)  # so that the next one's nodes lie elsewhere
        hashes.add(program.apply(parallel(pp=2, microbatches=2)).lower().plan.content_hash())
    assert len(hashes) == 1
