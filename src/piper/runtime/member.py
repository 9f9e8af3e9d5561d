"""Member: one rank's process, with its communicators and the plans it has loaded."""

from __future__ import annotations

import resource
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.plan.types import plan_from_json
from piper.runtime.board import Board, clear
from piper.runtime.distributed import Communicators, DistributedTransport
from piper.runtime.host_order import PeerError
from piper.runtime.storages import held_bytes
from piper.runtime.worker import Worker


class Member:
    """Does what a driver asks: each public method is a command that takes one payload."""

    def __init__(self, rank: int, *, device: str = "cpu", cells: memoryview | None = None) -> None:
        self.rank = rank
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.cells = Board(1).cells(0) if cells is None else cells
        clear(self.cells)
        self.communicators = Communicators(self.device)
        self.workers: dict[str, Worker] = {}  # by the plan's role: "train", ...

    def load(self, payload: Mapping[str, Any]) -> str:
        """Get ready for a plan. A new one to train on replaces all that were loaded."""
        plan = plan_from_json(payload["plan"])
        name = payload.get("name", "train")
        if name == "train":
            self.workers.clear()
            clear(self.cells)
        self.communicators.prepare(plan)
        self.workers[name] = Worker(
            plan,
            self.rank,
            bodies=payload["bodies"],
            transport=DistributedTransport(self.communicators),
            device=str(self.device),
            cells=self.cells,
        )
        return plan.content_hash()

    def step(self, payload: Mapping[str, Any]) -> dict[str, float]:
        return self.workers[payload.get("name", "train")].step(payload["leaves"])

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """A copy of each on the CPU: a view would be sent with the memory of its whole bucket."""
        held = self.workers["train"].tensors(kind)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}

    def memory(self, _: object = None) -> dict[str, int]:
        """Bytes by what they are for, measured on live storages, and the most that was in use."""
        worker = self.workers["train"]
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {**held_bytes(worker), "peak": peak}

    def look(self) -> None:
        """Note on the board what a device is busy with, which its host does not see."""
        for worker in list(self.workers.values()):
            worker.order.look()

    def answer(self, name: str, payload: Any) -> tuple[str, Any]:
        """Run a command; whatever happens becomes a message."""
        try:
            return "ok", getattr(self, name)(payload)
        except Exception as error:
            return ("lost" if isinstance(error, PeerError) else "error"), {
                "error": f"{type(error).__name__}: {error}",
                "command": name,
                "trace": traceback.format_exc().strip().splitlines(),
            }


def join(
    rank: int,
    num_ranks: int,
    *,
    timeout: float,
    init_method: str | None = None,
    store: dist.Store | None = None,
) -> None:
    """Become a rank of the default group, which meets by `init_method` or at `store`. It moves no
    training data; groups of plans do."""
    from datetime import timedelta

    dist.init_process_group(
        "gloo",
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )


def leave() -> None:
    """Give up all communicators without waiting for others."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError as error:  # a peer was faster
            print(f"leaving: {error}", file=sys.stderr)
