"""Local: one process per rank on this machine, driven over a socket each."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan, bind
from piper.runtime.messages import receive, send
from piper.runtime.shares import share_of

START_SECONDS = 120
REPLY_SECONDS = 600
EXIT_SECONDS = 10
GRACE_SECONDS = 1.0  # after a failure, time for other ranks to say what they saw
_CAUSES = ("died", "error", "lost")  # a peer that was lost is the effect, not the cause


class LocalPool:
    """Worker processes that wait for plans of their number of ranks; many plans, one after another."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.mkdtemp(prefix="piper-")
        key = secrets.token_bytes(16)
        address = os.path.join(self._folder, "driver")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        with Listener(address, family="AF_UNIX", backlog=num_ranks, authkey=key) as listener:
            for rank in range(num_ranks):
                self.processes.append(self._spawn(rank, address, key))
            try:
                self._accept(listener)
            except BaseException:
                self.close(kill=True)
                raise

    def _spawn(self, rank: int, address: str, key: bytes) -> subprocess.Popen[bytes]:
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "PIPER_KEY": key.hex(),
            "OMP_NUM_THREADS": "1",
        }
        store = os.path.join(self._folder, "store")
        command = [sys.executable, "-m", "piper.runtime.process"]
        command += [str(rank), str(self.num_ranks), address, store]
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
                found[receive(connection)] = connection
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

    def ask(self, messages: list[Any]) -> list[Any]:
        """Send each rank its message and collect all answers; any failure ends the pool."""
        if not self.alive:
            raise RunError("the worker processes have ended", legal="launch again")
        try:
            for connection, message in zip(self.connections, messages, strict=True):
                with contextlib.suppress(ConnectionError):  # its death is seen when answers come in
                    send(connection, message)
            return self._collect()
        except BaseException:
            self.close(kill=True)
            raise

    def _collect(self) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[tuple[str, int, Any]] = []
        deadline = time.monotonic() + REPLY_SECONDS
        while len(answers) < self.num_ranks:
            missing = {id(c): r for r, c in enumerate(self.connections) if r not in answers}
            waiting = [self.connections[rank] for rank in missing.values()]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = missing[id(connection)]
                status, answers[rank] = self._answer(rank)
                if status != "ok":
                    failures.append((status, rank, answers[rank]))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise _failure(*min(failures, key=lambda f: (_CAUSES.index(f[0]), f[1])))
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        if silent:
            raise RunError(f"ranks {silent} did not answer within {REPLY_SECONDS} s")
        return [answers[rank] for rank in range(self.num_ranks)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            return receive(self.connections[rank])
        except (EOFError, ConnectionError):
            return "died", self.processes[rank].wait(EXIT_SECONDS)

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
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failure(status: str, rank: int, payload: Any) -> RunError:
    if status == "died":
        return RunError(f"rank {rank} ended with exit code {payload}")
    message = f"rank {rank} failed{payload['where']}: {payload['error']}"
    return RunError(message, details=payload["trace"])


class LocalRun:
    """A plan on a pool; the pool is its own unless it was given one."""

    def __init__(
        self, plan: Plan, bodies: Mapping[str, str], *, pool: LocalPool | None = None
    ) -> None:
        if pool is not None and pool.num_ranks != plan.mesh.size:
            raise RunError(f"the pool has {pool.num_ranks} ranks, the plan {plan.mesh.size}")
        self.plan = plan
        self.own_pool = pool is None
        self.pool = pool or LocalPool(plan.mesh.size)
        self.ranks = [bind(plan, rank) for rank in range(plan.mesh.size)]
        message = ("load", (plan.to_json(), dict(bodies)))
        hashes = self.pool.ask([message] * plan.mesh.size)
        if set(hashes) != {plan.content_hash()}:
            raise RunError(f"ranks hold different plans: {sorted(set(hashes))}")

    def step(self, leaves: Mapping[str, Tensor]) -> list[dict[str, float]]:
        messages = []
        for me in self.ranks:
            share = share_of(self.plan, leaves, me.data_rank)
            used = {slot.source for slot in me.slots if slot.kind == "batch"}
            # A view would be sent with the memory of the whole batch.
            messages.append(("step", {k: v.clone() for k, v in share.items() if k in used}))
        return self.pool.ask(messages)

    def evaluate(
        self, plan: Plan, bodies: Mapping[str, str], leaves: Mapping[str, Tensor]
    ) -> list[dict[str, float]]:
        raise RunError("processes cannot evaluate yet", legal='launch("loopback") or ("single")')

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self.pool.ask([("tensors", kind)] * self.plan.mesh.size)

    def close(self) -> None:
        if self.own_pool:
            self.pool.close()
