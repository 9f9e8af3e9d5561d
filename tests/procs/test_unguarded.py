"""A script without `if __name__ == "__main__"`: one error, and no ranks that launch ranks."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "unguarded.py"


def test_a_script_that_ranks_import_does_not_launch_others() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    line = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "train(" in text)
    last = done.stderr.strip().splitlines()[-2:]
    assert f"unguarded.py:{line}): a rank imports this file for its data" in last[0]
    assert 'under if __name__ == "__main__":' in last[1]
    assert done.stdout.count("rank 0 is up") == 1
