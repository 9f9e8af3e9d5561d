"""Torchrun: this process is one of the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from piper.errors import RunError
from piper.ir.tensor_type import Shapes
from piper.plan.types import Plan
from piper.runtime.failure.board import NOTHING, Board, Where, where
from piper.runtime.failure.failure import Failure, as_error
from piper.runtime.failure.rollcall import Rollcall
from piper.runtime.launch.devices import devices_of
from piper.runtime.launch.member import Member, join, leave, told
from piper.runtime.launch.pool import Reading
from piper.runtime.launch.shares import agreed_shapes
from piper.runtime.launch.torchrun_environment import NEEDED
from piper.runtime.order.host_order import PeerError

START_SECONDS = 300
LOOK_SECONDS = 0.5
GRACE_SECONDS = 1.5  # for other ranks to say where they are
QUIET_SECONDS = 15  # for the rank that speaks, before the others end by themselves


class TorchrunPool:
    """The rank of this process: every rank makes every call."""

    reading: Reading = "rank"
    sends = False
    reads_data = False  # whether a training loop has ranks read for themselves

    def __init__(self, num_ranks: int, *, device: str = "cpu", timeout: float = 120.0) -> None:
        missing = [name for name in NEEDED if name not in os.environ]
        if missing:
            raise RunError(
                f"{', '.join(missing)} not in the environment",
                legal="torchrun --nproc-per-node N FILE.py",
            )
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world != num_ranks:
            raise RunError(
                f"torchrun started {world} ranks, the plan has {num_ranks}",
                legal=f"--nproc-per-node {num_ranks}, over all nodes",
            )
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.timeout = timeout
        self.own_group = not dist.is_initialized()
        if self.own_group:
            seconds = START_SECONDS + timeout  # others wait for a rank that reads its data
            join(rank, num_ranks=world, store=_store(rank, world, seconds), timeout=seconds)
        local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.board = os.memfd_create("piper-board")
        cells = Board(1, f"/proc/self/fd/{self.board}").cells(0)
        self.member = Member(rank, device=devices_of(per_node, device)[local], cells=cells)
        self.rollcall = Rollcall(rank, world, self.board)
        self._stepping = False
        self._reading = ""  # what this rank waits for the next batch of
        self._speaking = threading.Lock()
        self._closed = threading.Event()
        self._watch()

    @property
    def ranks(self) -> Sequence[int]:
        return (self.rank,)

    @property
    def members(self) -> Sequence[Member]:
        return (self.member,)

    @property
    def plans(self) -> dict[str, Plan]:
        """All that are loaded, by role."""
        return {name: worker.plan for name, worker in self.member.workers.items()}

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        """Every rank's answer, on every rank; a step's result is the same on all."""
        [payload] = payloads
        mine = self._do(command, payload)
        return [mine] if command == "step" else self.gather(mine, command)

    def gather(self, mine: Any, command: str = "fetch") -> list[Any]:
        """What all ranks have."""
        answers: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(answers, mine)
        except RuntimeError as error:
            self._fail(PeerError(command, str(error)), command)
        return answers

    def agree(self, *mine: int) -> list[list[int]]:
        """The numbers of all ranks."""
        numbers = torch.tensor(mine)
        found = [torch.zeros_like(numbers) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(found, numbers)
        except RuntimeError as error:
            self._fail(PeerError("fetch", str(error)), "fetch")
        return [numbers.tolist() for numbers in found]

    def shapes(self, mine: Shapes, known: Sequence[Shapes]) -> Shapes:
        """Of the global batch. In a training loop some ranks read none, and all agree: on one of those
        that they know, or a new one. Else each is given a batch, or takes it to be like the example."""
        if not self.reads_data:
            return mine or known[0]
        number = known.index(mine) if mine in known else len(known)
        found = {n for [n] in self.agree(number if mine else NOTHING) if n != NOTHING}
        if found < {len(known)} or (len(found) == 1 and found != {len(known)}):
            return known[min(found, default=0)]
        every: list[Shapes] = [()] * self.num_ranks
        dist.all_gather_object(every, mine)
        return agreed_shapes({rank: shapes for rank, shapes in enumerate(every) if shapes})

    @contextlib.contextmanager
    def waiting_for(self, data: str) -> Iterator[None]:
        """Inside, this rank reads a batch: it may take as long as a step without progress."""
        self._reading = data
        try:
            yield
        finally:
            self._reading = ""

    def stop(self, failure: Exception | None) -> NoReturn:
        """End, on every rank, with the failure of those that could not read."""
        if failure is not None:
            self._fail(failure, "fetch")
        time.sleep(2 * GRACE_SECONDS)
        raise SystemExit(1)

    def speak(self) -> None:
        """This rank has an error of its own to raise: the others end without a word."""
        with self._speaking:
            self.rollcall.speaks()

    def from_first(self, mine: Any) -> Any:
        """What rank 0 has."""
        found = [mine]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            os.close(self.board)
        if self.own_group:
            leave()

    def _do(self, command: str, payload: Any) -> Any:
        self._stepping = command == "step"
        try:
            return getattr(self.member, command)(payload)
        except Exception as error:
            self._fail(error, command)
        finally:
            self._stepping = False

    def _fail(self, error: Exception, command: str) -> NoReturn:
        """Raise what happened here, unless another rank has spoken: then end without a word."""
        lost = isinstance(error, PeerError | dist.DistError)
        facts = told(error, command, self.member.at)
        here = where(self.member.cells)
        with self._speaking:
            first = self.rollcall.speaks()
            if first and not lost:
                board, _ = self.rollcall.call(GRACE_SECONDS)
                board[self.rank] = here
                raise as_error(Failure("error", self.rank, facts, board), self.plans) from None
            if first:  # whoever starts the ranks may end this one soon: no time to ask others
                board = [here] * self.num_ranks
                failure = Failure("lost", self.rank, facts, board)
                _say(RunError(as_error(failure, self.plans).message))
        time.sleep(0 if first else QUIET_SECONDS)
        raise SystemExit(1)

    def _watch(self) -> None:
        """Beside the work: post where this rank is, end a step that gets no further, and end with the
        process that started this one."""
        cells, parent = self.member.cells, os.getppid()

        def watch() -> None:
            seen, since = where(cells), time.monotonic()
            while not self._closed.wait(LOOK_SECONDS):
                self.member.look()
                now = where(cells)
                if os.getppid() != parent:
                    os._exit(1)
                if now != seen or not (self._stepping or self._reading):
                    seen, since = now, time.monotonic()
                with contextlib.suppress(RuntimeError):  # the store is gone: others will be, too
                    self.rollcall.post(now)
                if time.monotonic() - since > self.timeout:
                    self._give_up(now)

        threading.Thread(target=watch, daemon=True, name="piper-watch").start()

    def _give_up(self, here: Where) -> None:
        """Say who hangs, if nobody has said anything yet, and end this process."""
        with contextlib.suppress(RuntimeError), self._speaking:
            if self._reading and self.rollcall.speaks():
                facts = {"seconds": self.timeout, "waiting": [self.rank], "command": "fetch"}
                failure = Failure("hangs", -1, {**facts, "data": self._reading})
                _say(as_error(failure, self.plans))
            elif self.rollcall.speaks():
                board, silent = self.rollcall.call(GRACE_SECONDS)
                board[self.rank] = here
                facts = {"seconds": self.timeout, "frozen": silent, "command": "step"}
                _say(as_error(Failure("hangs", -1, facts, board), self.plans))
                for rank in silent:
                    self.rollcall.kill(rank)
            else:
                time.sleep(QUIET_SECONDS)
        os._exit(1)


def _store(rank: int, world: int, seconds: float) -> dist.Store:
    """Where ranks meet. torchrun keeps its store when it starts ranks anew: without a name for each
    start a rank would find addresses of processes that are gone."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=seconds)))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"piper.{start}.{world}", store)


def _say(error: RunError) -> None:
    print(f"piper: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
