"""Torchrun: this process is one of the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan, bind
from piper.runtime.failure.board import Board, Where, where
from piper.runtime.failure.failure import Failure, as_error
from piper.runtime.failure.rollcall import Rollcall
from piper.runtime.launch.devices import devices_of
from piper.runtime.launch.member import Member, join, leave, told
from piper.runtime.launch.pool_run import Reading
from piper.runtime.launch.shares import share_of
from piper.runtime.order.host_order import PeerError

START_SECONDS = 300
LOOK_SECONDS = 0.5
GRACE_SECONDS = 1.5  # for other ranks to say where they are
QUIET_SECONDS = 15  # for the rank that speaks, before the others end by themselves
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or something like it, started."""
    return all(name in os.environ for name in NEEDED)


class TorchrunRun:
    """The rank of this process. A batch is this rank's share, or the global one, of which it takes its
    share; every rank calls every method."""

    reading: Reading = "rank"

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        *,
        timeout: float = 120.0,
        compile: bool = False,
    ) -> None:
        missing = [name for name in NEEDED if name not in os.environ]
        if missing:
            raise RunError(
                f"{', '.join(missing)} not in the environment",
                legal="torchrun --nproc-per-node N FILE.py",
            )
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world != plan.mesh.size:
            raise RunError(
                f"torchrun started {world} ranks, the plan has {plan.mesh.size}",
                legal=f"--nproc-per-node {plan.mesh.size}, over all nodes",
            )
        self.plan = plan
        self.plans: dict[str, Plan] = {}  # all that are loaded, by role
        self.me = bind(plan, rank)
        self.timeout = timeout
        self.options = {"compile": compile}
        self.own_group = not dist.is_initialized()
        if self.own_group:
            seconds = START_SECONDS + timeout  # others wait for a rank that reads its data
            join(rank, num_ranks=world, init_method="env://", timeout=seconds)
        local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.board = os.memfd_create("piper-board")
        cells = Board(1, f"/proc/self/fd/{self.board}").cells(0)
        self.member = Member(rank, device=devices_of(per_node, plan.device)[local], cells=cells)
        self.rollcall = Rollcall(rank, world, self.board)
        self._stepping = False
        self._reading = ""  # what this rank waits for the next batch of
        self._speaking = threading.Lock()
        self._closed = threading.Event()
        self._watch()
        self.load(plan, bodies, "train")

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        """Get ready for a plan, unless this rank is."""
        if self.plans.get(name) is plan:
            return
        payload = {"name": name, "plan": plan.to_json(), "bodies": bodies, **self.options}
        self.plans[name] = plan
        hashes = self._all("load", payload)
        if set(hashes) != {plan.content_hash()}:
            raise RunError(f"ranks hold different plans: {sorted(set(hashes))}")

    def step(self, leaves: Mapping[str, Tensor] | None) -> list[dict[str, float]]:
        share = {} if leaves is None else self._share(leaves)
        return [self._do("step", {"leaves": share})]

    def evaluate(
        self, plan: Plan, bodies: Mapping[str, str], leaves: Mapping[str, Tensor] | None
    ) -> list[dict[str, float]]:
        """Run an evaluation of the plan on its live parameters."""
        self.load(plan, bodies, "eval")
        share = {} if leaves is None else self._share(leaves)
        return [self._do("step", {"name": "eval", "leaves": share})]

    def set_options(self, options: Mapping[str, Any]) -> None:
        self.member.workers["train"].set_options(options)

    def agree(self, mine: int) -> list[int]:
        """The numbers of all ranks."""
        number = torch.tensor([mine])
        found = [torch.zeros_like(number) for _ in range(self.plan.mesh.size)]
        try:
            dist.all_gather(found, number)
        except RuntimeError as error:
            self._fail(PeerError("fetch", str(error)), "fetch")
        return [int(one) for one in found]

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

    def from_first(self, mine: Any) -> Any:
        """What rank 0 has."""
        found = [mine]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def describe(self) -> list[dict[str, str]]:
        return self._all("describe", None)

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self._all("tensors", kind)

    def memory(self) -> list[dict[str, int]]:
        return self._all("memory", None)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            os.close(self.board)
        if self.own_group:
            leave()

    def _share(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = {name: leaf.shape[0] for name, leaf in self.plan.batch.items()}
        if all(leaves[name].shape[0] == size for name, size in sizes.items()):
            return share_of(self.plan, leaves, self.me.data_rank)
        return dict(leaves)

    def _all(self, command: str, payload: Any) -> list[Any]:
        """Every rank's answer, on every rank."""
        mine = self._do(command, payload)
        found: list[Any] = [None] * self.plan.mesh.size
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            self._fail(PeerError(command, str(error)), command)
        return found

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
                board[self.me.rank] = here
                raise as_error(Failure("error", self.me.rank, facts, board), self.plans) from None
            if first:  # whoever starts the ranks may end this one soon: no time to ask others
                board = [here] * self.plan.mesh.size
                failure = Failure("lost", self.me.rank, facts, board)
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
                facts = {"seconds": self.timeout, "waiting": [self.me.rank], "command": "fetch"}
                failure = Failure("hangs", -1, {**facts, "data": self._reading})
                _say(as_error(failure, self.plans))
            elif self.rollcall.speaks():
                board, silent = self.rollcall.call(GRACE_SECONDS)
                board[self.me.rank] = here
                facts = {"seconds": self.timeout, "frozen": silent, "command": "step"}
                _say(as_error(Failure("hangs", -1, facts, board), self.plans))
                for rank in silent:
                    self.rollcall.kill(rank)
            else:
                time.sleep(QUIET_SECONDS)
        os._exit(1)


def _say(error: RunError) -> None:
    print(f"piper: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
