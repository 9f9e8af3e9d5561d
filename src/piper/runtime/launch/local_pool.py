"""Local: one process per rank on this machine, driven over a socket each."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from piper.errors import RunError
from piper.runtime.failure.board import Board
from piper.runtime.failure.failure import Failure, as_error, first_cause
from piper.runtime.failure.patience import START_SECONDS, Patience
from piper.runtime.launch.devices import devices_of
from piper.runtime.launch.mps import Mps
from piper.runtime.launch.parent_process import EXIT_SECONDS, WorkerProcess, parent_process
from piper.runtime.launch.pickles import receive, send
from piper.runtime.launch.pool import Reading
from piper.runtime.transport.gates import make_shared

GRACE_SECONDS = 1.0  # after a failure, time for other ranks to say what they saw
LOOK_SECONDS = 0.5
Report = Callable[[int, str], None]


class LocalPool:
    """Worker processes that wait for plans of their number of ranks; many plans, one after another.

    A step in which no rank gets further for `timeout` seconds has failed. `ranks_per_gpu` ranks share
    each card. `report` is told what becomes of each rank.
    """

    program = "piper.runtime.launch.process"
    reading: Reading = "members"
    sends = True

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
        self.spares = False  # whether other ranks live on when one is lost
        self.processes: list[WorkerProcess] = []
        self.connections: list[Connection] = []
        devices = devices_of(num_ranks, device, ranks_per_gpu)
        self._parent = parent_process(self.program)
        self._mps: Mps | None = None
        try:
            self.board = Board(num_ranks, os.path.join(self._parent.folder, "board"))
            if ranks_per_gpu > 1:
                self._mps = Mps(self._parent.folder).__enter__()
            self._start(devices, ranks_per_gpu)
        except Failure as failure:
            self.close(kill=True)
            raise as_error(failure, {}) from None
        except BaseException:
            self.close(kill=True)
            raise

    def _start(self, devices: list[str], ranks_per_gpu: int) -> None:
        pairs = [_socket_pair(self.timeout) for _ in devices]
        self.connections = [Connection(ours.detach()) for ours, _ in pairs]
        with contextlib.ExitStack() as ends:
            sockets = [ends.enter_context(theirs) for _, theirs in pairs]
            environments = [self._environment(r, ranks_per_gpu) for r in range(self.num_ranks)]
            self.processes = self._parent.fork(
                sockets, environments, num_ranks=self.num_ranks, devices=devices
            )
        self._collect("start", self.report)
        store = f"file://{os.path.join(self._parent.folder, 'store')}"
        joining = {"num_ranks": self.num_ranks, "init_method": store, "timeout": START_SECONDS}
        if self.device == "cpu" or self.num_ranks == 1:
            self.call("join", [joining] * self.num_ranks)
            return
        gates = make_shared()
        try:
            problems = self.call("join", [{**joining, "gates": gates}] * self.num_ranks)
        finally:
            os.unlink(gates)  # who has opened it keeps it
        if any(problems):
            self.call("ungate", [None] * self.num_ranks)

    def _environment(self, rank: int, ranks_per_gpu: int) -> dict[str, str]:
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **_queues(self.device, ranks_per_gpu),
            **os.environ,
            "OMP_NUM_THREADS": "1",
        }
        if self._mps is not None:
            # NCCL refuses two ranks on one card of one host.
            environment |= {**self._mps.env(100 / ranks_per_gpu), "NCCL_HOSTID": f"host{rank}"}
        return environment

    @property
    def alive(self) -> bool:
        return bool(self.connections)

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.num_ranks)

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        """Send each rank its message and collect all answers; any failure ends the pool."""
        if not self.alive:
            raise RunError("the worker processes have ended", legal="launch again")
        try:
            for rank, payload in enumerate(payloads):
                self._send(rank, command, payload)
            return self._collect(command)
        except Failure as failure:
            if not (self.spares and failure.is_loss):
                self.close(kill=True)
            raise
        except BaseException:
            self.close(kill=True)
            raise

    def ask(self, command: str, payloads: Mapping[int, Any]) -> dict[int, Any]:
        """What ranks answer that a failure has left, of those that do within the time."""
        for rank, payload in payloads.items():
            self._send(rank, command, payload)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(payloads) and time.monotonic() < deadline:
            for rank in self._ready({r: None for r in self.ranks if r not in payloads} | answers):
                answers[rank] = self._answer(rank, command)
        return {rank: found for rank, (status, found) in answers.items() if status == "ok"}

    def _send(self, rank: int, command: str, payload: Any) -> None:
        try:
            send(self.connections[rank], (command, payload))
        except ConnectionError:
            pass  # its death is seen when answers come in
        except BlockingIOError:
            raise self._frozen(rank, command) from None

    def _collect(self, command: str, report: Report | None = None) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        patience = Patience.of(self.board, command, self.timeout)
        deadline = float("inf")
        while len(answers) < self.num_ranks and time.monotonic() < deadline:
            for rank in self._ready(answers):
                status, answers[rank] = self._answer(rank, command)
                if status != "ok":
                    failures.append(Failure(status, rank, answers[rank]))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                elif report:
                    report(rank, "is up: process {pid} on {device}".format(**answers[rank]))
            facts = patience.over([r for r in range(self.num_ranks) if r not in answers])
            if facts and not failures:
                failures.append(Failure("hangs", -1, {**facts, "command": command}))
                break
        if failures:
            cause = first_cause(failures, self.board.snapshot())
            cause.survivors = survivors_of(answers, failures)
            raise cause
        return [answers[rank] for rank in range(self.num_ranks)]

    def _ready(self, answers: Mapping[int, Any]) -> list[int]:
        """Ranks that have an answer, or whose process has ended, after a moment."""
        missing = {id(c): r for r, c in enumerate(self.connections) if r not in answers}
        waiting = [self.connections[rank] for rank in missing.values()]
        found = [missing[id(connection)] for connection in wait(waiting, timeout=LOOK_SECONDS)]
        # A process of a rank's own may hold its socket open after its death.
        ended = [r for r in missing.values() if self.processes[r].poll() is not None]
        return list(dict.fromkeys([*found, *ended]))

    def _answer(self, rank: int, command: str) -> tuple[Any, Any]:
        try:
            if self.processes[rank].poll() is None or self.connections[rank].poll():
                return receive(self.connections[rank])
        except BlockingIOError:
            return "hangs", self._frozen(rank, command).facts
        except (EOFError, ConnectionError):
            pass
        code = self.processes[rank].wait(EXIT_SECONDS)
        return "died", {"code": code, "command": command}

    def _frozen(self, rank: int, command: str) -> Failure:
        """A rank that leaves a message half read or half written."""
        facts = {"seconds": self.timeout, "frozen": [rank], "command": command}
        return Failure("hangs", rank, facts, self.board.snapshot())

    def close(self, *, kill: bool = False) -> None:
        """End all processes; `kill` does not wait for work under way."""
        try:
            if not kill:
                self._say_close()
        finally:
            self._parent.end()
            for connection in self.connections:
                connection.close()
            self.connections, self.processes = [], []
            if self._mps is not None:
                self._mps.close()
                self._mps = None
            self._parent.close()

    def _say_close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError, ValueError):
                send(connection, ("close", None))
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def survivors_of(answers: Mapping[int, Any], failures: Sequence[Failure]) -> list[int]:
    """Ranks that answered, if only that they had lost others."""
    gone = {failure.rank for failure in failures if failure.kind != "lost"}
    return sorted(rank for rank in answers if rank not in gone)


def _socket_pair(timeout: float) -> tuple[socket.socket, socket.socket]:
    """Our end gives up on a message that is half way for too long: its process may be stopped."""
    ours, theirs = socket.socketpair()
    seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, seconds)
    return ours, theirs


def _queues(device: str, ranks_per_gpu: int) -> dict[str, str]:
    """A card that a rank has to itself gives it the most queues there can be, so that none of its
    streams waits behind another; ranks that share a card share its queues (`Mps.env`)."""
    alone = device != "cpu" and ranks_per_gpu == 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if alone else {}
