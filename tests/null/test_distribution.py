"""The distribution: what it is called, and that its types reach a user's type checker."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import piper

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PROGRAM = """
import torch
from torch import nn

import piper
from piper import where


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def strategy(s: piper.Schedule) -> None:
    mesh = s.mesh(dp=2)
    s.place(where(), mesh.at())
    s.replicate(where(), over="dp", zero=2)


program = piper.trace(lambda: nn.Linear(2, 2), torch.ones(4, 2), step)
job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
with job.launch("loopback") as run:
    loss: float = run.step(torch.ones(4, 2)).loss
training = piper.train(job, [torch.ones(4, 2)], steps=1)
losses: list[float] = training.losses
wrong: str = training.losses
job.lower()
program.stpe
piper.tracee
"""


def test_it_is_not_called_as_another_project_is() -> None:
    """`piper` on the package index is another one; the module and the command keep the name."""
    name = PROJECT["name"]
    assert name == "piper-distributed" and PROJECT["scripts"] == {"piper": "piper.cli.main:main"}
    extras = PROJECT["optional-dependencies"]
    assert {f"{name}[ray]", f"{name}[docs]"} <= set(extras["dev"]) and {"ray", "docs"} <= set(
        extras
    )
    assert PROJECT["version"] == piper.__version__
    for path in [*ROOT.glob("src/piper/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]:
        text = path.read_text()
        assert "piper[ray]" not in text and f"{name}[ray]" not in text, f"{path}: of no index"


def test_make_and_the_readme_say_where_the_command_is() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--silent", "demo"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1].startswith("echo 'the command piper is .venv/bin/piper")
    assert "source .venv/bin/activate" in done.stdout
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()


@pytest.mark.timeout(600)
def test_a_users_program_is_checked_against_the_types(tmp_path: Path) -> None:
    assert (ROOT / "src" / "piper" / "py.typed").exists()
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
        + ["--cache-dir", str(ROOT / ".mypy_cache")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        check=False,
    )
    errors = [line.partition(": error: ") for line in done.stdout.splitlines() if "error:" in line]
    lines = PROGRAM.splitlines()
    where = [lines[int(at.rpartition(":")[2]) - 1] for at, _, _ in errors]
    assert where == [
        "wrong: str = training.losses",
        "job.lower()",
        "program.stpe",
        "piper.tracee",
    ], done.stdout
