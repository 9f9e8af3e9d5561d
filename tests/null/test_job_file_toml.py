"""Job files: options in TOML beside those of the command line, which win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.cli.main import main, parsed
from tests.procs import tiny

JOB = """
file = "model.py"
steps = 7
launch = "loopback"
debug = true
checkpoint = "run"

[strategy]
dp = 2
zero = 2
microbatches = 2

[training]
clip = 1  # a float

[verify]
steps = 1

[simulate]
slow-rank = ["0:2", "1:1.5"]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(Path(tiny.__file__).read_text())
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_its_keys_are_options_and_its_paths_are_beside_it(job: Path) -> None:
    found = parsed(["train", str(job)])
    assert found.file == str(job.parent / "model.py")
    assert found.checkpoint == str(job.parent / "run")
    assert (found.steps, found.launch, found.debug) == (7, "loopback", True)
    assert (found.dp, found.zero, found.microbatches, found.pp) == (2, 2, 2, None)
    assert isinstance(found.clip, float) and found.clip == 1.0
    assert found.argv == ["train", str(job)]


def test_the_command_line_wins(job: Path) -> None:
    words = ["--dp", "4", "--steps=3", "--no-debug", "--pp", "2"]
    found = parsed(["train", *words[:2], str(job), *words[2:]])
    assert (found.dp, found.steps, found.debug, found.pp) == (4, 3, False, 2)
    assert found.zero == 2
    assert parsed(["simulate", str(job)]).slow_rank == ["0:2", "1:1.5"]
    assert parsed(["simulate", str(job), "--slow-rank", "1:3"]).slow_rank == ["1:3"]


def test_other_commands_take_what_they_share_with_train(job: Path) -> None:
    plan, verify = parsed(["plan", str(job)]), parsed(["verify", str(job)])
    assert (plan.dp, plan.clip, verify.zero) == (2, 1.0, 2)
    assert not hasattr(plan, "steps") and not hasattr(plan, "checkpoint")
    assert (verify.steps, verify.launch) == (1, "loopback")
    assert parsed(["simulate", str(job)]).steps == 2  # not train's


def test_commands_run_by_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job), "--steps", "2", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert any(event["event"] == "checkpoint" for event in events)
    assert main(["plan", str(job), "--dp", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"]["dp"] == 4
    assert main(["verify", str(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("steps = 7", "stesp = 7", 3, "no option is called 'stesp' (did you mean 'steps'?)"),
        ("zero = 2", "zeero = 2", 10, "no option is called 'zeero' (did you mean 'zero'?)"),
        ("[strategy]", "[options]", 8, "no group of options is called 'options'"),
        ("[strategy]", "[stratgy]", 8, "is called 'stratgy' (did you mean 'strategy'?)"),
        ("dp = 2", 'dp = "two"', 9, "dp = 'two': invalid int value: 'two'"),
        ("dp = 2", "dp = true", 9, "dp = True"),
        ("dp = 2", "help = true", 9, "no option is called 'help'"),
        ("dp = 2", 'model = "x.py"', 9, "no option is called 'model' (did you mean 'file'?)"),
        ("dp = 2", "dp = 2024-01-01", 9, "invalid int value"),
        ("dp = 2", "dp.n = 2", 9, "dp = {'n': 2}"),
        ("dp = 2", "dp = [2, 4]", 9, "dp takes one value, not a list"),
        ("debug = true", "debug = 1", 5, "debug = 1"),
        ('"loopback"', '"loopbak"', 4, "launch = 'loopbak' (did you mean 'loopback'?)"),
    ],
)
def test_what_is_wrong_has_its_line(
    before: str,
    after: str,
    line: int,
    words: str,
    job: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job.write_text(JOB.replace(before, after))
    for command in ("train", "plan"):
        with pytest.raises(SystemExit):
            main([command, str(job)])
        said = capsys.readouterr().err
        assert said.startswith(f"OptionError: job file ({job}:{line}): ") and words in said
        assert "\n  legal: " in said
    with pytest.raises(SystemExit):
        main(["train", str(job), "--json"])
    assert json.loads(capsys.readouterr().out)["where"] == f"{job}:{line}"


def test_the_page_shows_a_job_that_is_one(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    job.write_text(page.partition("```toml\n")[2].partition("```")[0])
    train, verify = parsed(["train", str(job)]), parsed(["verify", str(job)])
    assert (train.steps, train.log_every, train.resume, train.every) == (1000, 10, True, 100)
    assert (train.pp, train.dp, train.schedule, train.precision) == (2, 4, "zb_h1", "bf16")
    assert (verify.steps, verify.pp) == (2, 2)
    assert parsed(["train", str(job), "--dp", "8", "--no-resume"]).resume is False
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert main(["plan", tiny.__file__, "--dp", "3", "--ep", "2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == shown


def test_a_file_that_is_none_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("pp = = 2", f"pp = {'9' * 5000}", f"pp = {'[' * 100_000}"):
        job.write_text(text)
        assert main(["train", str(job)]) == 2
        assert "is no TOML" in capsys.readouterr().err
    job.write_text("steps = 2")
    assert main(["train", str(job)]) == 2
    assert "does not name the model's file" in capsys.readouterr().err
    assert main(["train", str(job.with_name("none.toml"))]) == 2
    assert "there is no file" in capsys.readouterr().err
