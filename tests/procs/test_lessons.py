"""The ten lessons as a user runs them: each asserts what it teaches, and prints what its page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piper.files import module_of
from tests.same_text import difference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
lessons = module_of(str(DOCS / "lessons.py"))


@pytest.mark.parametrize("name", lessons.names())
def test_a_lesson_runs_and_its_page_is_true(name: str, tmp_path: Path) -> None:
    printed = lessons.run_script(name, tmp_path)
    page = lessons.page(name, printed, tmp_path)
    differs = difference((DOCS / "lessons" / f"{name}.md").read_text(), page)
    assert not differs, f"make docs: {differs}"
    for path, drawn in lessons.pictures(name, tmp_path).items():
        differs = difference((DOCS / path).read_text(), drawn, near=3)  # pixels
        assert not differs, f"make docs: {path}: {differs}"


def test_the_last_lesson_runs_under_torchrun() -> None:
    script = "examples/lessons/10_more_machines.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started by torchrun") == 1
    page = (DOCS / "lessons" / "10_more_machines.md").read_text()
    assert done.stdout.partition(": [")[2].strip() in page
