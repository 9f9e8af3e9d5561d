"""Mps: NVIDIA's multi-process service, by which several ranks run on one card at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

from piper.errors import RunError

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS, QUIT_SECONDS = 20, 20
_PIPES = "mps-pipes"


class Mps:
    """A service of our own, with its pipes and logs in `folder`; `close` ends it."""

    def __init__(self, folder: str) -> None:
        self.pipes = os.path.join(folder, _PIPES)
        self.logs = os.path.join(folder, "mps-logs")
        self.running = False
        if shutil.which(CONTROL) is None:
            raise RunError(
                f"several ranks on one GPU need {CONTROL}, which this machine does not have",
                legal="ranks_per_gpu=1, or a driver that brings MPS",
            )
        for path in (self.pipes, self.logs):
            os.makedirs(path, mode=0o700, exist_ok=True)
        done = self._control(["-d"], "", START_SECONDS)
        if done is None or done.returncode != 0:
            reason = "it did not answer" if done is None else (done.stderr or done.stdout).strip()
            raise RunError(
                f"{CONTROL} did not start: {reason or f'exit code {done and done.returncode}'}",
                legal="ranks_per_gpu=1",
            )
        self.running = True

    def env(self, percentage: int) -> dict[str, str]:
        """What a process needs to take part, with a share of each card's multiprocessors."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": self.pipes,
            "CUDA_MPS_LOG_DIRECTORY": self.logs,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage),
        }

    def close(self) -> None:
        """End the service; the processes that used it have ended before."""
        if self.running:
            self.running = False
            self._control([], "quit\n", QUIT_SECONDS)

    def _control(
        self, arguments: list[str], words: str, seconds: float
    ) -> subprocess.CompletedProcess[str] | None:
        environment = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": self.pipes,
            "CUDA_MPS_LOG_DIRECTORY": self.logs,
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                [CONTROL, *arguments],
                input=words,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        return None


def clear_away(folder: str) -> None:
    """Remove a pool's folder after its driver, by whichever rank comes first. A service with its pipes
    there is ended before, by a process of its own, since it waits for the processes that use it."""
    pipes = os.path.join(folder, _PIPES)
    with contextlib.suppress(OSError):  # another rank was faster
        if os.path.isdir(pipes) and shutil.which(CONTROL):
            os.mkdir(os.path.join(folder, "ended"))
            subprocess.Popen(
                ["sh", "-c", f'echo quit | {CONTROL}; rm -rf "$0"', folder],
                env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipes},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        else:
            gone = f"{folder}.gone"  # so that no rank makes a file in it meanwhile
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
