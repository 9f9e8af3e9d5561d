"""The main function of a worker process: connect to the driver, then do as it asks."""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

from piper.plan.types import plan_from_json
from piper.runtime.distributed import TIMEOUT, Communicators, DistributedTransport
from piper.runtime.messages import receive, send
from piper.runtime.profile import profiled
from piper.runtime.worker import PeerError, Worker


class _Process:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.communicators = Communicators()
        self.worker: Worker | None = None

    def load(self, message: tuple[bytes, dict[str, str]]) -> str:
        data, bodies = message
        plan = plan_from_json(data)
        self.communicators.prepare(plan)
        transport = DistributedTransport(self.communicators)
        self.worker = Worker(plan, self.rank, bodies=bodies, transport=transport)
        return plan.content_hash()

    def step(self, leaves: dict[str, torch.Tensor]) -> dict[str, float]:
        assert self.worker is not None
        return self.worker.step(leaves)

    def profile(self, message: tuple[dict[str, torch.Tensor], str]) -> str:
        """A step like any other, and its trace in a file."""
        leaves, path = message
        return profiled(lambda: self.step(leaves), path)

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        assert self.worker is not None
        # A view would be sent with the memory of its whole bucket.
        return {name: tensor.clone() for name, tensor in self.worker.tensors(kind).items()}


def main(rank: int, num_ranks: int, address: str, store: str) -> None:
    torch.set_num_threads(1)
    connection = Client(address, authkey=bytes.fromhex(os.environ.pop("PIPER_KEY")))
    send(connection, rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )
    process = _Process(rank)
    try:
        while True:
            name, payload = receive(connection)
            if name == "close":
                break
            send(connection, _answer(process, name, payload))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the driver is gone, or wants us gone
    finally:
        dist.destroy_process_group()


def _answer(process: _Process, name: str, payload: Any) -> tuple[str, Any]:
    try:
        return "ok", getattr(process, name)(payload)
    except Exception as error:
        worker = process.worker
        where = f" in {worker.current_task}" if worker and name == "step" else f" in {name}"
        return ("lost" if isinstance(error, PeerError) else "error"), {
            "error": f"{type(error).__name__}: {error}",
            "where": where,
            "trace": traceback.format_exc().strip().splitlines(),
        }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
