"""docs/where_does_my_step_go.md: its commands run, one after the other, and say what the page says."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from piper.cli.main import main
from piper.observe.timeline_files import load_timeline

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "where_does_my_step_go.md").read_text()
DIRECTIVE = r"s\.replicate\(where\(\), over=\('dp', 'ep'\), zero=3, reduce_every=1\)"
PLANNED, BUCKET = (
    98.4,
    14.1,
)  # MiB: the first plan's peak in the order of dispatch, and its one bucket


def test_the_page_goes_from_a_profile_to_a_shorter_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = []
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    commands = [line.removeprefix("$ piper ") for block in blocks for line in block.splitlines()]
    assert len(commands) == 8
    for command in commands:
        code = main(shlex.split(command))
        assert code == (1 if command.startswith("diff") else 0), command
        said.append(capsys.readouterr().out)
    profiled, explained, memory, *simulated, _, diff = said
    assert "measured" in profiled and "likely reason" in profiled
    share = re.search(rf"([\d.]+)%  {DIRECTIVE}", explained)
    assert share and float(share[1]) > 0
    gathered = re.search(r"([\d.]+) MiB +[\d.]+%  gathered", memory)
    assert gathered and float(gathered[1]) == pytest.approx(28.1, abs=0.1)
    steps = [_seconds(text) for text in simulated]
    assert len(steps) == 3 and steps[2] < steps[0]
    for text in (diff, PAGE):  # a reduction and a gather that last longer hold a bucket each
        held = re.search(r"memory ([\d.]+) MiB -> 56.2 MiB", text)
        assert held and PLANNED - BUCKET < float(held[1]) < PLANNED + 2.1 * BUCKET
    if os.environ.get("PIPER_LONG"):  # how much is gained: beside other processes, they decide it
        assert float(share[1]) > 30
        assert steps == sorted(steps, reverse=True) and steps[2] < 0.9 * steps[0]
        before, after = (
            sorted(load_timeline(f"{name}.timeline").step_seconds)[4]
            for name in ("before", "after")
        )
        assert after < 0.9 * before


def _seconds(text: str) -> float:
    """Of the simulated step, which a busy machine may make longer than a second."""
    found = re.search(r"simulated step: ([\d.]+) (ms|s)\b", text)
    assert found, text
    return float(found[1]) * {"ms": 1e-3, "s": 1}[found[2]]
