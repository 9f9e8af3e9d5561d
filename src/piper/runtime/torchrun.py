"""Torchrun: this process is one of the ranks that torchrun started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan, bind
from piper.runtime.board import Where
from piper.runtime.devices import devices_of
from piper.runtime.failure import Failure, as_error
from piper.runtime.host_order import PeerError
from piper.runtime.member import Member, join, leave
from piper.runtime.pool_run import Reading
from piper.runtime.shares import share_of

START_SECONDS = 300
GRACE_SECONDS = 2.0  # for other ranks to say where they are
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
            join(rank, world, init_method="env://", timeout=START_SECONDS)
        local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.member = Member(rank, device=devices_of(per_node, plan.device)[local])
        self._stepping = threading.Event()
        self._closed = threading.Event()
        self._watch()
        self.load(plan, bodies, "train")

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        """Get ready for a plan, unless this rank is."""
        if self.plans.get(name) is plan:
            return
        self.plans[name] = plan
        payload = {"name": name, "plan": plan.to_json(), "bodies": bodies, **self.options}
        hashes = self._all(self.member.load(payload))
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
        dist.all_gather(found, number)
        return [int(one) for one in found]

    def from_first(self, mine: Any) -> Any:
        """What rank 0 has."""
        found = [mine]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def describe(self) -> list[dict[str, str]]:
        return self._all(self.member.describe())

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self._all(self.member.tensors(kind))

    def memory(self) -> list[dict[str, int]]:
        return self._all(self.member.memory())

    def close(self) -> None:
        self._closed.set()
        if self.own_group:
            leave()

    def _share(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = {name: leaf.shape[0] for name, leaf in self.plan.batch.items()}
        if all(leaves[name].shape[0] == size for name, size in sizes.items()):
            return share_of(self.plan, leaves, self.me.data_rank)
        return dict(leaves)

    def _do(self, command: str, payload: Any) -> Any:
        self._stepping.set()
        try:
            return getattr(self.member, command)(payload)
        except Exception as error:
            kind: Any = "lost" if isinstance(error, PeerError) else "error"
            facts = {"error": f"{type(error).__name__}: {error}", "command": command}
            board = [Where(0, -1, -1)] * self.plan.mesh.size
            board[self.me.rank] = self._where()
            failure = as_error(Failure(kind, self.me.rank, facts, board), self.plan)
            raise RunError(failure.message) from error
        finally:
            self._stepping.clear()

    def _where(self) -> Where:
        step, task, waits = self.member.cells[:3]
        return Where(step, task, waits)

    def _all(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.plan.mesh.size
        dist.all_gather_object(found, mine)
        return found

    def _watch(self) -> None:
        """Beside the work: a step in which this rank gets no further ends the process. Ranks tell each
        other where they are, and the first that still can says what happened."""
        store = dist.distributed_c10d._get_default_store()

        def watch() -> None:
            seen, since = self._where(), time.monotonic()
            while not self._closed.wait(0.5):
                self.member.look()
                now = self._where()
                if now != seen or not self._stepping.is_set():
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > self.timeout:
                    self._give_up(store)

        threading.Thread(target=watch, daemon=True, name="piper-watch").start()

    def _give_up(self, store: Any) -> None:
        where = self._where()
        store.set(f"piper/{self.me.rank}", f"{where.step} {where.task} {where.waits}")
        time.sleep(GRACE_SECONDS)
        board, speakers = [], []
        for rank in range(self.plan.mesh.size):
            key = f"piper/{rank}"
            if store.check([key]):
                board.append(Where(*(int(n) for n in store.get(key).decode().split())))
                speakers.append(rank)
            else:
                board.append(Where(where.step, 0, -1))
        if self.me.rank == min(speakers):
            failure = Failure("hangs", -1, {"seconds": self.timeout}, board)
            print(f"piper: {as_error(failure, self.plan)}", file=sys.stderr, flush=True)
        os._exit(1)
