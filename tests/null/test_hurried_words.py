"""Commands in a hurry: words without a place, files that do not import, closed streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piper.cli import schedule_command, stage_lines
from piper.cli.main import main

MODEL = """
print("imported")
import torch
from torch import nn


def model():
    print("made")
    return nn.Linear(4, 2)


def batch():
    print("drawn")
    return torch.ones(8, 4)


def step(model, batch):
    return model(batch).square().mean()
"""


def _misused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, start in (
        (["help"], "usage: piper COMMAND"),
        (["help", "train"], "usage: piper train"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0 and capsys.readouterr().out.startswith(start)
    assert "no command 'trian' (did you mean 'train'?)" in _misused(capsys, "help", "trian")


def test_a_word_without_a_place_is_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = _misused(capsys, "train", "a.py", "b.py", "--steps", "2")
    assert "piper train: b.py: there is no place for it" in said
    assert "legal: see piper train --help" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef model(:\n", "{file}:2: SyntaxError: invalid syntax\n    def model(:\n"),
        ("import torch\n  x = 1\n", "{file}:2: IndentationError: unexpected indent\n    x = 1\n"),
        (
            "import sys\nsys.exit(3)\n",
            "FileError: {file} ends its own import ({file}:2)\n"
            "  legal: definitions at the top, and what "
            'runs them under if __name__ == "__main__":\n',
        ),
    ],
)
def test_a_file_that_does_not_import_has_its_line(
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my model.py").write_text(text)
    assert main(["plan", "my model.py"]) == 2
    assert capsys.readouterr().err == said.format(file="my model.py")
    assert main(["plan", "my model.py", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "my model.py:2" in (found["where"] or found["message"])


def test_options_of_its_own_end_a_files_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse at the top of a file takes piper's command line for its own."""
    file = tmp_path / "own.py"
    file.write_text("import argparse\n\nargparse.ArgumentParser().parse_args(['--pp'])\n")
    assert main(["plan", str(file), "--pp", "2"]) == 2
    assert f"own.py ends its own import ({file}:3)" in capsys.readouterr().err


def test_a_file_that_is_near_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(MODEL)
    for word in ("progam.py", "program", "./progrm.py", "nowhere/program.py"):
        assert main(["plan", word]) == 2
        said = capsys.readouterr().err
        assert f"there is no file {word}" in said and "\n  legal: " in said
        assert ("program.py'?)" in said) == ("nowhere" not in word)


def test_prints_of_the_users_code_stay_out_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speaks.py"
    file.write_text(MODEL)
    assert main(["plan", str(file), "--json"]) == 0
    printed = capsys.readouterr()
    [line] = printed.out.splitlines()
    assert json.loads(line)["num_ranks"] == 1
    assert {"imported", "made", "drawn"} <= set(printed.err.splitlines())
    assert main(["plan", str(file)]) == 0
    assert "imported" in capsys.readouterr().out


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_take_everything(closed: str) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sys.executable} -m piper schedule 1f1b --ranks 2 --microbatches 2 {closed}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Error" not in done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_json_that_cannot_be_written_is_told_on_stderr() -> None:
    command = f"{sys.executable} -m piper doctr --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean 'doctor'?" in done.stderr
    assert "Traceback" not in done.stderr


SWALLOWS = """
import os, signal, time
from piper.cli.stage_lines import ending_at_once

with ending_at_once():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except BaseException:  # as extensions of torch do while they are imported
        pass
print("went on")
"""


def test_an_interrupt_ends_the_import_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_second_interrupt_ends_a_process_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        for run in (interrupted, lambda _: 130):
            signal.signal(signal.SIGINT, before)
            monkeypatch.setattr(schedule_command, "run", run)
            assert main(["schedule", "1f1b"]) == 130
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stage_takes_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((30, 20)))
    assert stage_lines._on_one_line("tracing model.py ...") == "tracing model.py ..."
    text = stage_lines._on_one_line("tracing a/very/long/path/to/model.py ...")
    assert text == "tracing a/very/long/path/t..." and len(text) == 29
