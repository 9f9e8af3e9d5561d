"""LoopbackPool: all ranks in this process, on real tensors, in any order that the plan allows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from piper.errors import RunError
from piper.runtime.launch.in_process import InProcessPool
from piper.runtime.transport.loopback import LoopbackTransport
from piper.runtime.transport.loopback_engine import Observe, drive


class LoopbackPool(InProcessPool):
    """Members whose steps run side by side: one's task, then another's, as streams and waits allow.

    The `adversary` takes a random order by `seed`. `observe` sees a worker after each thing that it
    did, so that what it holds can be measured.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        adversary: bool = False,
        seed: int = 0,
        observe: Observe | None = None,
    ) -> None:
        if device != "cpu":
            raise RunError("loopback runs on the CPU", legal='lower(device="cpu")')
        self.transport = LoopbackTransport()
        super().__init__(num_ranks, device=device, transport=self.transport)
        self.adversary = Random(seed) if adversary else None
        self.observe = observe

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        return self._step(payloads) if command == "step" else super().call(command, payloads)

    def _step(self, payloads: Sequence[Any]) -> list[dict[str, Any]]:
        if payloads[0] is None:
            return self._finish()
        workers = []
        for member, payload in zip(self.members, payloads, strict=True):
            worker, leaves = member.prepare_step(payload)
            # The adversary overwrites what is freed, which may not be the user's own batch.
            worker.load_batch({name: leaf.clone() for name, leaf in leaves.items()})
            workers.append(worker)
        try:
            with torch.no_grad():
                drive(workers, adversary=self.adversary, observe=self.observe)
        finally:  # a step that failed leaves nothing for the next one
            self.transport.clear()
        for member, worker in zip(self.members, workers, strict=True):
            member.begun.append(worker.end_step())
        return [{} for _ in workers] if payloads[0].get("ahead") else self._finish()

    def _finish(self) -> list[dict[str, Any]]:
        try:
            return [member.finish_step() for member in self.members]
        except BaseException:
            for member in self.members:
                member.begun.clear()
            raise
