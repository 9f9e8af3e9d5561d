"""Local: one process per rank on this machine, driven over a socket each."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from piper.errors import RunError
from piper.runtime.board import Board
from piper.runtime.devices import devices_of
from piper.runtime.failure import CAUSES, Failure
from piper.runtime.messages import receive, send
from piper.runtime.mps import Mps
from piper.runtime.pool_run import Message

START_SECONDS = 120
LOAD_SECONDS = 1800  # bodies may be compiled
EXIT_SECONDS = 10
GRACE_SECONDS = 1.0  # after a failure, time for other ranks to say what they saw
LOOK_SECONDS = 0.5
Report = Callable[[int, str], None]


class LocalPool:
    """Worker processes that wait for plans of their number of ranks; many plans, one after another.

    A step in which no rank gets further for `timeout` seconds has failed. `ranks_per_gpu` ranks share
    each card. `report` is told what becomes of each rank.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        ranks_per_gpu: int = 1,
        timeout: float = 120.0,
        report: Report | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self.timeout = timeout
        self.report = report or (lambda rank, text: None)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        devices = devices_of(num_ranks, device, ranks_per_gpu)
        self._folder = tempfile.mkdtemp(prefix="piper-")
        self._mps: Mps | None = None
        try:
            self.board = Board(num_ranks, os.path.join(self._folder, "board"))
            if ranks_per_gpu > 1:
                self._mps = Mps(self._folder)
            self._start(devices, ranks_per_gpu)
        except BaseException:
            self.close(kill=True)
            raise

    def _start(self, devices: list[str], ranks_per_gpu: int) -> None:
        settings = {
            "num_ranks": self.num_ranks,
            "devices": devices,
            "driver": os.getpid(),
            "timeout": START_SECONDS,
        }
        with open(os.path.join(self._folder, "settings.json"), "w") as file:
            json.dump(settings, file)
        key = secrets.token_bytes(16)
        address = os.path.join(self._folder, "driver")
        with Listener(address, "AF_UNIX", self.num_ranks, authkey=key) as listener:
            for rank in range(self.num_ranks):
                self.processes.append(self._spawn(rank, key, ranks_per_gpu))
            self._accept(listener)

    def _spawn(self, rank: int, key: bytes, ranks_per_gpu: int) -> subprocess.Popen[bytes]:
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **os.environ,
            "PIPER_KEY": key.hex(),
            "OMP_NUM_THREADS": "1",
        }
        if self._mps is not None:
            # NCCL refuses two ranks on one card of one host.
            environment |= {**self._mps.env(100 // ranks_per_gpu), "NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-m", "piper.runtime.process", str(rank), self._folder]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def _accept(self, listener: Listener) -> None:
        """Wait for every process to call; give up when one has died or time is over."""
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(0.2)
        while len(found) < self.num_ranks:
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()
                hello = receive(connection)
                found[hello["rank"]] = connection
                self.report(hello["rank"], f"is up: process {hello['pid']} on {hello['device']}")
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    raise RunError(
                        f"rank {rank} ended at its start (exit code {process.returncode})"
                    )
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.num_ranks)) - found.keys())
                raise RunError(f"ranks {missing} did not start within {START_SECONDS} s")
        self.connections = [found[rank] for rank in range(self.num_ranks)]

    @property
    def alive(self) -> bool:
        return bool(self.connections)

    def ask(self, messages: list[Message]) -> list[Any]:
        """Send each rank its message and collect all answers; any failure ends the pool."""
        if not self.alive:
            raise RunError("the worker processes have ended", legal="launch again")
        try:
            for connection, message in zip(self.connections, messages, strict=True):
                with contextlib.suppress(ConnectionError):  # its death is seen when answers come in
                    send(connection, message)
            return self._collect(messages[0][0])
        except BaseException:
            self.close(kill=True)
            raise

    def _collect(self, command: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        patience = Patience(self.board, self.timeout if command == "step" else LOAD_SECONDS)
        deadline = float("inf")
        while len(answers) < self.num_ranks and time.monotonic() < deadline:
            missing = {id(c): r for r, c in enumerate(self.connections) if r not in answers}
            waiting = [self.connections[rank] for rank in missing.values()]
            for connection in wait(waiting, timeout=LOOK_SECONDS):
                rank = missing[id(connection)]
                status, answers[rank] = self._answer(rank, command)
                if status != "ok":
                    failures.append(Failure(status, rank, answers[rank]))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not failures and patience.over():
                facts = {"seconds": patience.seconds, "command": command}
                failures.append(Failure("hangs", -1, facts))
                break
        if failures:
            failure = min(failures, key=lambda f: (CAUSES.index(f.kind), f.rank))
            failure.board = self.board.snapshot()
            raise failure
        return [answers[rank] for rank in range(self.num_ranks)]

    def _answer(self, rank: int, command: str) -> tuple[Any, Any]:
        try:
            return receive(self.connections[rank])
        except (EOFError, ConnectionError):
            return "died", {"code": self.processes[rank].wait(EXIT_SECONDS), "command": command}

    def close(self, *, kill: bool = False) -> None:
        """End all processes; `kill` does not wait for work under way."""
        if kill:
            for process in self.processes:
                process.kill()
        for connection in self.connections:
            with contextlib.suppress(OSError, ValueError):
                send(connection, ("close", None))
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self.connections:
            connection.close()
        self.connections, self.processes = [], []
        if self._mps is not None:
            self._mps.close()
            self._mps = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Patience:
    """Ends when nothing on the board has changed for some seconds."""

    def __init__(self, board: Board, seconds: float) -> None:
        self.board = board
        self.seconds = seconds
        self.seen = board.snapshot()
        self.since = time.monotonic()

    def over(self) -> bool:
        now = self.board.snapshot()
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since > self.seconds
