"""A script without `if __name__ == "__main__"`: one error, and no ranks that launch ranks."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "unguarded.py"
MENDED = Path(__file__).parents[1] / "error" / "mended" / "unguarded.py"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script.name],
        capture_output=True, text=True, timeout=120, check=False, cwd=script.parent,
    )  # fmt: skip


def test_a_script_that_ranks_import_does_not_launch_others(
    pytestconfig: pytest.Config,
) -> None:
    done = run(SCRIPT)
    assert done.returncode != 0
    line = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "train(" in text)
    last = "\n".join(done.stderr.strip().splitlines()[-2:]) + "\n"
    text = last.removeprefix("piper.errors.")
    assert f"unguarded.py:{line}): a rank imports this file for its data" in text
    golden = SCRIPT.with_suffix(".txt")
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert done.stdout.count("rank 0 is up") == 1


def test_under_the_guard_it_trains() -> None:
    done = run(MENDED)
    assert done.returncode == 0, done.stderr
    assert math.isfinite(float(done.stdout.splitlines()[-1]))
