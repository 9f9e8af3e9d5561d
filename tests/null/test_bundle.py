"""The script and the style sheet in the package are those of the sources in web/."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
OTHERS = ("build.mjs", "package-lock.json", "package.json", "tsconfig.json")


def sources_hash() -> str:
    """As web/build.mjs has it: every file's name and content, in the order of their names."""
    found = [
        path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()
    ]
    total = hashlib.sha256()
    for name in sorted([*found, *OTHERS]):
        total.update(f"{name}\n".encode())
        total.update((WEB / name).read_bytes())
    return total.hexdigest()


@pytest.mark.parametrize("name", ["report.js", "report.css"])
def test_the_bundle_is_that_of_its_sources(name: str) -> None:
    bundle = files("piper.view").joinpath("assets", name).read_text(encoding="utf-8")
    first = bundle.splitlines()[0]
    assert first == f"/* sources {sources_hash()} */", "web/ has changed: make web"


def test_nothing_is_asked_from_the_network() -> None:
    for name in ("report.js", "report.css", "page.html"):
        text = files("piper.view").joinpath("assets", name).read_text(encoding="utf-8")
        assert "http://" not in text and "https://" not in text, name
