"""A real Chromium for tests: what it is told to do goes to node, what it answers comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PLAYWRIGHT = HERE.parents[1] / "web" / "node_modules" / "playwright-core"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """Why no browser can be driven here; '' if one can."""
    if not shutil.which("node"):
        return "there is no node"
    if not any(map(shutil.which, NAMES)):
        return f"there is none of {', '.join(NAMES)}"
    if not PLAYWRIGHT.exists():
        return "web/node_modules is missing: make browser"
    return ""


def require_browser() -> None:
    """CI must not pass without one; elsewhere its tests are skipped."""
    if why := missing():
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"no browser: {why}")


class Chromium:
    """One page at a time."""

    def __init__(self, folder: Path) -> None:
        executable = next(path for path in map(shutil.which, NAMES) if path)
        self._process = subprocess.Popen(
            ["node", os.fspath(HERE / "drive.mjs"), executable, os.fspath(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the browser's driver has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def do(self, action: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def open(self, file: Path, *, theme: str = "light") -> float:
        """Milliseconds until the report is drawn."""
        return float(self.do("open", file=os.fspath(file), theme=theme))

    def visit(self, url: str, *, theme: str = "light") -> None:
        """A page of a server on this machine."""
        self.do("open", url=url, theme=theme)

    def evaluate(self, code: str) -> Any:
        return self.do("evaluate", code=code)

    def wait(self, code: str, *, seconds: float = 5.0) -> None:
        self.do("wait", code=code, ms=1000 * seconds)

    def text(self, selector: str) -> str:
        return str(self.do("text", selector=selector))

    def problems(self) -> list[str]:
        """What pages have complained of, and asked the network for, since this was asked last."""
        return list(self.do("problems"))

    def leave(self) -> list[str]:
        """Close the page; its problems."""
        return list(self.do("leave"))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()
