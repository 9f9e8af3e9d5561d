"""The MPS daemon: started, described to clients and ended, with a stand-in for NVIDIA's program."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from piper.errors import RunError
from piper.runtime.launch.mps import CONTROL, Mps

GOOD = """#!/bin/sh
# Notes what it is asked; "-d" starts it, as far as one can see from outside.
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = "-d" ]; then
  echo "start $CUDA_MPS_LOG_DIRECTORY" >> "$NOTES"; echo 1 > "$pid"
  sleep 30 &  # keeps the output open, as a daemon does
  echo $! >> "$NOTES.pid"
  exit 0
fi
read line
echo "$line" >> "$NOTES"
[ "$line" = quit ] && rm "$pid"
exit 0
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield tmp_path / "notes"
    pids = tmp_path / "notes.pid"
    for pid in pids.read_text().split() if pids.exists() else []:
        os.kill(int(pid), 9)


def install(folder: Path, text: str) -> None:
    program = folder / CONTROL
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_daemon_is_started_and_ended(notes: Path) -> None:
    install(notes.parent, GOOD)
    with Mps() as mps:
        folder, env = mps.folder, mps.env(percentage=25)
        assert env == {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        }
        assert all(os.path.isdir(env[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in mps.env()
    assert notes.read_text().splitlines() == [f"start {folder}/log", "get_server_list", "quit"]
    assert not os.path.exists(folder)


def test_two_daemons_do_not_meet(notes: Path) -> None:
    install(notes.parent, GOOD)
    with Mps() as one, Mps() as other:
        assert one.env() != other.env()


def test_a_daemon_of_the_environment_is_used_and_left(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(notes.parent, GOOD)
    with Mps() as mine:
        for name, value in mine.env().items():
            monkeypatch.setenv(name, value)
        with Mps() as other:
            assert other.env(percentage=50) == mine.env(percentage=50)
        assert "quit" not in notes.read_text()
        assert os.path.exists(mine.folder)


def test_a_missing_program_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="not on the PATH"), Mps():
        pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('#!/bin/sh\necho "no device found"; exit 1\n', "exit code 1"),
        (
            '#!/bin/sh\n[ "$1" = -d ] && exit 0\n'
            'read line; echo "Cannot find MPS control daemon process"; exit 1\n',
            "is not there",
        ),
    ],
)
def test_a_daemon_that_does_not_start_is_refused(notes: Path, text: str, reason: str) -> None:
    install(notes.parent, text)
    mps = Mps()
    with pytest.raises(RunError, match=reason) as caught, mps:
        pass
    assert "no device found" in str(caught.value) or "Cannot find MPS" in str(caught.value)
    assert mps.folder == ""
