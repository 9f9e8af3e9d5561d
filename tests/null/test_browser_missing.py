"""Where no browser can be driven, its tests say why; where CI runs them, they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import require_browser


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
@pytest.mark.parametrize(("have", "why"), [([], "no node"), (["node"], "none of chromium")])
def test_without_a_browser(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    have: list[str],
    why: str,
    ci: str,
    outcome: type[BaseException],
) -> None:
    for name in have:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=why):
        require_browser()
