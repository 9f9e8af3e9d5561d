"""The user's files: only regular ones of a bounded size are read, and only bounded JSON is decoded."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from piper.cli.main import main
from piper.errors import FileError, PiperError, PlanError, ScheduleError, StrategyError
from piper.files import DEPTH, TEXT_LIMIT, excess, read_bytes, read_text, write_bytes
from piper.ir.form.graph_text import graph_from_text, graph_to_text
from piper.plan.types import plan_from_json
from piper.schedules import parse_json, read_table, schedule
from piper.strategies import from_json, parallel
from tests.mutations import mutate
from tests.zoo import program_of

EXAMPLES = Path(__file__).parents[2] / "examples"
READERS: list[tuple[Callable[[Path], object], type[PiperError]]] = [
    (lambda path: read_bytes(path, limit=100), FileError),
    (read_text, FileError),
    (from_json, StrategyError),
    (read_table, ScheduleError),
]
COMMANDS = [
    ["check", "PATH"],
    ["explain", "PATH", "F"],
    ["diff", "PATH", "PATH"],
    ["schedule", "PATH"],
    ["plan", str(EXAMPLES / "dense.py"), "--strategy", "PATH"],
]


def _refused(read: Callable[[Path], object], path: Path, error: type[PiperError], why: str) -> None:
    start = time.process_time()
    with pytest.raises(error, match=why):
        read(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("read", "error"), READERS)
def test_what_is_no_regular_file_is_refused_at_once(
    read: Callable[[Path], object], error: type[PiperError], tmp_path: Path
) -> None:
    pipe, folder, link = tmp_path / "pipe.json", tmp_path / "folder.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to("/dev/zero")
    _refused(read, pipe, error, "it is a pipe")
    _refused(read, folder, error, "it is a folder")
    _refused(read, link, error, "it is a device")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s.json"))
        _refused(read, tmp_path / "s.json", error, "cannot be read")
    _refused(read, tmp_path / "none.json", error, "there is no file")
    _refused(read, Path("a\0b.json"), error, "cannot be read")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_a_pipe(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    assert main([str(pipe) if word == "PATH" else word for word in command]) == 2
    assert "cannot be read: it is a pipe" in capsys.readouterr().err


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    with path.open("wb") as file:
        file.truncate(TEXT_LIMIT + 1)  # no disk space: a hole
    _refused(read_table, path, ScheduleError, "more than 16 MiB")
    path.write_bytes(b"x" * 100)
    assert len(read_bytes(path, limit=100)) == 100


def test_text_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    path.write_bytes(b"\xff\xfe")
    _refused(read_text, path, FileError, "it is not text")
    _refused(from_json, path, StrategyError, "it is not text")
    path.write_bytes(b"\xef\xbb\xbfx")
    assert read_text(path) == "x"


def test_excess() -> None:
    assert not excess(b"[" * DEPTH + b"]" * DEPTH)
    assert excess(b"[" * (DEPTH + 1)) == f"brackets nest more than {DEPTH} deep"
    assert not excess(b'["' + b"[" * 1000 + rb"\"" + b"{" * 1000 + b'"]')
    assert "is no 64-bit integer" in excess(b"[9223372036854775808]")
    assert "of 5000 digits" in excess(b"9" * 5000)
    for number in (b"9223372036854775807", b"-9223372036854775807", b"0.00012345678901234567891"):
        assert not excess(b"[" + number + b"]")
    assert not excess(b'"99999999999999999999999"')


@pytest.mark.parametrize("data", [b"[" * 10**6, b'{"mesh":' * 10**5, b'{"x":' + b"[" * 10**6])
def test_deep_nesting_is_refused_before_it_is_decoded(data: bytes) -> None:
    for read, error in ((plan_from_json, PlanError),):
        with pytest.raises(error, match="brackets nest more than 64 deep"):
            read(data)
    with pytest.raises(ScheduleError, match="brackets nest"):
        parse_json(data.decode(), name="deep")
    with pytest.raises(StrategyError, match="brackets nest"):
        from_json(data.decode())


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "plan.json", "a\0b"):
        with pytest.raises(FileError, match="cannot be written"):
            write_bytes(path, b"")


def test_damaged_text_of_a_graph() -> None:
    good = graph_to_text(program_of("tied").apply(parallel(dp=2, microbatches=2)).graph).encode()
    refused = 0
    for seed in range(300):
        text = mutate(good, Random(seed)).decode(errors="replace")
        try:
            graph_to_text(graph_from_text(text))
        except PlanError:
            refused += 1
    assert refused > 100


def test_a_schedule_by_name_is_bounded() -> None:
    start = time.process_time()
    with pytest.raises(ScheduleError, match="4 ranks x 1000000000 microbatches"):
        schedule("1f1b", num_ranks=4, num_microbatches=10**9)
    assert time.process_time() - start < 1
