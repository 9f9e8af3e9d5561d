"""Mps: NVIDIA's multi-process service, so that ranks that share a GPU run side by side on it."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import tempfile
import time

from piper.errors import RunError

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 20
QUIT_SECONDS = 20
QUEUES = 32  # work queues that all ranks of a card ask for together
_PREFIX = "piper-mps-"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class Mps:
    """A daemon of our own, with its own folders; leaving the context ends it. Where the environment
    names a daemon already (CUDA_MPS_PIPE_DIRECTORY), that one is used and left running.

    with Mps() as mps:
        subprocess.Popen(command, env={**os.environ, **mps.env(percentage=25)})
    """

    def __init__(self, parent: str | None = None) -> None:
        self.parent = parent  # the folder of its folders
        self.folder = ""  # of our own daemon
        self._given: dict[str, str] = {}

    def __enter__(self) -> Mps:
        if shutil.which(CONTROL) is None:
            raise RunError(
                f"{CONTROL} is not on the PATH, so that ranks cannot share a GPU",
                legal="install the NVIDIA driver's MPS, or one rank per GPU",
            )
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        if names[0] in os.environ:
            self._given = {name: os.environ[name] for name in names if name in os.environ}
            self._ask()
            return self
        self.folder = tempfile.mkdtemp(prefix=_PREFIX, dir=self.parent)
        for name in ("pipe", "log"):
            os.mkdir(os.path.join(self.folder, name))
        try:
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def env(self, percentage: float | None = None) -> dict[str, str]:
        """What a process needs to be a client, with at most a percentage of the multiprocessors and as
        much of the queues, unless the environment says how many. A client that asks for none gets so
        few that its streams wait for each other; if all ask for too many, the last cannot start."""
        found = dict(self._given) or {
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(self.folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(self.folder, "log"),
        }
        if percentage is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percentage:g}"
            if _CONNECTIONS not in os.environ:
                found[_CONNECTIONS] = str(max(1, int(QUEUES * percentage / 100)))
        return found

    def _start(self) -> None:
        try:
            done = self._control(["-d"], seconds=START_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{CONTROL} does not start: {error}") from None
        if done.returncode != 0:
            raise RunError(
                f"{CONTROL} ended with exit code {done.returncode}", details=self._said(done)
            )
        self._ask()

    def _ask(self) -> None:
        """The daemon is up when it answers."""
        try:
            answer = self._control([], text="get_server_list\n", seconds=START_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"the daemon of {CONTROL} does not answer: {error}") from None
        if answer.returncode != 0 or "cannot find mps control daemon" in answer.stdout.lower():
            raise RunError(f"the daemon of {CONTROL} is not there", details=self._said(answer))

    def _control(
        self, arguments: list[str], *, text: str = "", seconds: float
    ) -> subprocess.CompletedProcess[str]:
        # Output goes to a file: a daemon keeps what it inherits open, and a pipe would never end.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [CONTROL, *arguments], env={**os.environ, **self.env()}, input=text, text=True,
                stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False,
            )  # fmt: skip
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read(), "")

    def _said(self, done: subprocess.CompletedProcess[str]) -> list[str]:
        """What the command printed and the last lines of the daemon's log."""
        lines = done.stdout.strip().splitlines()
        path = os.path.join(self.env().get("CUDA_MPS_LOG_DIRECTORY", ""), "control.log")
        if os.path.exists(path):
            with open(path, errors="replace") as log:
                lines += log.read().strip().splitlines()[-5:]
        return lines

    def close(self) -> None:
        """Quit the daemon, wait for its end, and remove its folders."""
        self._given = {}
        if not self.folder:
            return
        try:
            self._control([], text="quit\n", seconds=QUIT_SECONDS)
            deadline = time.monotonic() + QUIT_SECONDS
            pid = os.path.join(self.folder, "pipe", "nvidia-cuda-mps-control.pid")
            while os.path.exists(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
        except (OSError, subprocess.TimeoutExpired):
            pass  # it does not answer: there is nothing more that we may end
        finally:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = ""

    def __exit__(self, *_: object) -> None:
        self.close()


def clear_away(folder: str) -> None:
    """Remove a pool's folder after its driver, by whichever rank comes first. A daemon with its pipes
    there is ended before, by a process of its own, since it waits for the processes that use it."""
    pipes = glob.glob(os.path.join(folder, f"{_PREFIX}*", "pipe"))
    with contextlib.suppress(OSError):  # another rank was faster
        if pipes and shutil.which(CONTROL):
            os.mkdir(os.path.join(folder, "ended"))
            subprocess.Popen(
                ["sh", "-c", f'echo quit | {CONTROL}; rm -rf "$0"', folder],
                env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipes[0]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        else:
            gone = f"{folder}.gone"  # so that no rank makes a file in it meanwhile
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
