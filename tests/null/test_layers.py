"""Torch's private modules are used in few places, so that few places break with a new torch."""

import re
from pathlib import Path

import piper

ALLOWED = (
    "bodies/",
    "frontend/capture/capture.py",
    "frontend/capture/any_rows.py",
    "frontend/capture/mode_reads.py",
    "frontend/refuse/side_effects.py",  # Dynamo's notes of them
    "runtime/state/torch_metadata.py",  # where a checkpoint's chunks lie
)
PRIVATE = re.compile(
    r"^\s*(?:from|import) torch(?:\.\w+)*\._|^\s*from torch[\w.]* import .*\b_\w+", re.M
)


def test_private_modules_of_torch_stay_in_bodies_and_capture() -> None:
    home = Path(piper.__file__).parent
    users = {str(p.relative_to(home)) for p in home.rglob("*.py") if PRIVATE.search(p.read_text())}
    assert users, "the pattern finds nothing at all"
    assert {name for name in users if not name.startswith(ALLOWED)} == set()


def test_the_runtime_names_no_strategy() -> None:
    home = Path(piper.__file__).parent / "runtime"
    words = re.compile(r"gpipe|1f1b|dualpipe|\bzero\b|expert|pipeline|data.?parallel", re.I)
    named = {p.name: words.findall(p.read_text()) for p in home.rglob("*.py")}
    assert {name: found for name, found in named.items() if found} == {}
