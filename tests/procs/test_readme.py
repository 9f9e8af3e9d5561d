"""The README's program runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("procs")


def test_the_program_in_the_readme_trains(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert program is not None
    file = tmp_path / "program.py"
    file.write_text(program[1])
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"\d\.\d+", line)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
