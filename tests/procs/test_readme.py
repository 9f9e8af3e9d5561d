"""The README's program runs as it stands there, by itself and under every command that takes a file;
and so does the one of Start."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from piper.cli.main import main

pytestmark = pytest.mark.xdist_group("procs")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert program is not None
    file = tmp_path / "program.py"
    file.write_text(program[1])
    return file


def test_the_commands_take_the_program_in_the_readme(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--steps", "3", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    assert sorted(event["rank"] for event in events if event["event"] == "launch") == [0, 1, 2, 3]
    assert main(["plan", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["mesh"] == {"pp": 2, "dp": 2} and plan["num_microbatches"] == 4
    assert main(["verify", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True


def test_the_program_of_start_trains_and_is_planned_as_its_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "start.md").read_text()
    program = re.search(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    assert program is not None
    file = tmp_path / "program.py"
    file.write_text(program[1])
    commands = re.findall(r"^\$ piper (train|verify|plan) program.py (--pp.*)$", page, re.M)
    assert [command for command, _ in commands] == ["train", "verify", "plan"]
    for command, degrees in commands:
        options = degrees.replace("plan.json", str(tmp_path / "plan.json")).split()
        assert main([command, str(file), *options]) == 0
        said = capsys.readouterr().out
    for line in re.search(r"^\$ piper plan program.py.*?```", page, re.M | re.S)[0].splitlines():
        assert line[0] in "$.`" or line in said, line
    report = str(tmp_path / "report.html")
    assert main(["show", str(tmp_path / "plan.json"), "--out", report]) == 0


def test_the_program_in_the_readme_trains(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"\d\.\d+", line)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
