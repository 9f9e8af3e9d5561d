"""Stages of a command: on a terminal while they go on, in a log when they are done, not in JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from piper.bodies import device
from piper.cli.main import main
from tests.procs import tiny

TINY = tiny.__file__
ONE = ["train", TINY, "--launch", "single", "--steps", "1"]
MOE = str(Path(__file__).parents[2] / "examples" / "moe.py")


def test_a_log_has_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper.cli.stage_lines._WORTH_A_LINE", 0.0)
    assert main(ONE) == 0
    printed = capsys.readouterr()
    assert "\n1 rank, precision as written" in f"\n{printed.out}"
    lines = printed.err.splitlines()
    begins = ["imported torch and", "traced", "strategy: one device", "device cpu:", "lowered to a"]
    assert [line.startswith(b) for line, b in zip(lines, begins, strict=False)] == [True] * 5
    assert lines[0].endswith(" s") and "..." not in "".join(lines)


def test_a_terminal_sees_what_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("piper.cli.stage_lines._WORTH_A_LINE", 0.0)
    assert main(["plan", TINY]) == 0
    said = capsys.readouterr().err
    assert f"tracing {TINY} ...\r\x1b[Ktraced {TINY} in " in said
    assert "lowering ...\r\x1b[K" in said
    assert main(["plan", TINY, "--dp", "3"]) == 2  # an error stands alone on its line
    assert "\r\x1b[KSplitError: " in capsys.readouterr().err


def test_json_has_no_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*ONE, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(json.loads(line) for line in printed.out.splitlines())


def test_a_plan_in_a_pipe_has_no_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY]) == 0
    assert capsys.readouterr().err == ""


def test_degrees_stand_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MOE, "--dp", "4", "--ep", "2", "--zero", "1"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    made = "4 ranks, mesh pp=1 dp=2 ep=2 (the 4 data ranks are dp=2 x ep=2)"
    assert first == f"strategy --dp 4 --ep 2 --zero 1: {made}"
    assert main(["plan", MOE]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "strategy: one device"


def test_the_device_is_what_this_machine_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU the plan is for it; here there is none, so that its bodies are refused."""
    asked: list[str] = []

    def own_device() -> str:
        asked.append("cuda")
        return "cuda"

    monkeypatch.setattr(device, "own_device", own_device)
    monkeypatch.setattr(device, "gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])
    if device.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(ONE) == 2
    said = capsys.readouterr().err
    assert "device cuda: 2 x NVIDIA H200\n" in said and "legal: --device cpu" in said and asked
    assert main([*ONE, "--device", "cpu"]) == 0
    assert "device " not in capsys.readouterr().err  # as it was asked for


@pytest.mark.parametrize("every", [1, 3])
def test_every_nth_step_has_a_line(every: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", TINY, "--launch", "single", "--steps", "7", "--log-every", str(every)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in printed if line.startswith("step ")]
    assert steps == [f"{n}/7" for n in ((1, 2, 3, 4, 5, 6, 7) if every == 1 else (1, 3, 6, 7))]
    assert main([*words[:-1], "0"]) == 2
    assert "--log-every 0" in capsys.readouterr().err
