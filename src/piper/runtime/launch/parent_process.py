"""ParentProcess: a process that imports torch once, and forks a worker per rank when it is asked to.

It can be started long before there is a plan, so that it imports while the driver traces and lowers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

EXIT_SECONDS = 10
LOOK_SECONDS = 0.005
PROGRAM = "piper.runtime.launch.process"
DONE = b"done"  # what it is told when its workers are no longer needed
_waiting: dict[str, ParentProcess] = {}  # by program, until a pool takes them


def warm_up() -> None:
    """Start now what worker processes of `launch("local")` need, so that it imports torch meanwhile.

    A script calls it before it traces. The first run takes it; what no run takes ends with the script.
    """
    if PROGRAM not in _waiting:
        _waiting[PROGRAM] = ParentProcess(PROGRAM)
        atexit.register(cool_down)


def parent_process(program: str) -> ParentProcess:
    """One that waits already, or a new one."""
    waiting = _waiting.pop(program, None)
    if waiting is not None and waiting.code is None:
        return waiting
    if waiting is not None:
        waiting.close()
    return ParentProcess(program)


def cool_down() -> None:
    """End what `warm_up` has started, if no run has taken it."""
    while _waiting:
        _waiting.popitem()[1].close()


class ParentProcess:
    """`folder` is one for its workers' pool, which goes with it."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="piper-")
        self._pids: list[int] = []  # by rank, of all workers that were forked
        self._codes: dict[int, int] = {}  # by rank, of those that have ended
        # Whole messages: a rank and its socket there, ranks with pids and exit codes back.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            end = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(end), self.folder],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads would not survive the forks
                stdin=subprocess.DEVNULL,
                pass_fds=(end,),
                process_group=0,  # a Ctrl-C in the terminal is for the driver alone
            )

    @property
    def code(self) -> int | None:
        """Its own exit code, once it has ended. Popen.poll would take a lock for that, and keep it for
        good if an interrupt comes in the wrong moment."""
        known = self._process.returncode
        return exit_code(self._process.pid, os.WNOHANG) if known is None else known

    def fork(
        self,
        sockets: Sequence[socket.socket],
        environments: Sequence[dict[str, str]],
        **settings: object,
    ) -> list[WorkerProcess]:
        """A worker per socket, each in its environment; `settings` are for all."""
        settings |= {"environments": environments, "cwd": os.getcwd()}
        with open(os.path.join(self.folder, "settings.json"), "w") as file:
            json.dump(settings, file)
        with contextlib.suppress(ConnectionError):  # its end is seen when answers come in
            for rank, end in enumerate(sockets):
                socket.send_fds(self._socket, [str(rank).encode()], [end.fileno()])
        return [WorkerProcess(self, rank) for rank in range(len(sockets))]

    def pid(self, rank: int) -> int:
        """Of a worker; waits until it is forked."""
        while len(self._pids) <= rank and self._hear(EXIT_SECONDS):
            pass
        return self._pids[rank]

    def code_of(self, rank: int, seconds: float) -> int | None:
        """A worker's exit code, if it ends within some seconds; after a death of the parent, its."""
        deadline = time.monotonic() + seconds
        while rank not in self._codes:
            if not self._hear(max(0.0, deadline - time.monotonic())):
                return self._codes.get(rank, self.code)
        return self._codes[rank]

    def _hear(self, seconds: float) -> bool:
        """Take a message; False if none comes."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        try:
            words = self._socket.recv(64).split()
        except ConnectionError:
            return False
        if not words:
            return False
        rank, number = map(int, words[1:])
        if words[0] == b"pid":
            self._pids.append(number)
        else:
            self._codes[rank] = number
        return True

    def end(self) -> None:
        """End it with all of its workers, whatever those do."""
        if self._process.returncode is not None:
            return
        while self._hear(0.0):
            pass
        if self._pids:  # else it may be importing still
            with contextlib.suppress(OSError):
                self._socket.send(DONE)
            self._await_end(EXIT_SECONDS)
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the group has its workers, too
        self._process.wait()

    def _await_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """End it, and remove the folder."""
        self.end()
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def exit_code(pid: int, options: int = 0) -> int | None:
    """Of a child that has ended, which may be asked again; waits for its end unless told os.WNOHANG."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options)
    except ChildProcessError:  # whoever has started us has children vanish
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class WorkerProcess:
    """A worker, as subprocess.Popen is for a child of this process."""

    def __init__(self, parent: ParentProcess, rank: int) -> None:
        self.parent = parent
        self.rank = rank

    @property
    def pid(self) -> int:
        return self.parent.pid(self.rank)

    def poll(self) -> int | None:
        return self.parent.code_of(self.rank, 0.0)

    def wait(self, seconds: float) -> int | None:
        return self.parent.code_of(self.rank, seconds)
