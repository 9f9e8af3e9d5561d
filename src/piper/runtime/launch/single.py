"""Single: the one rank of a plan, in this process, on the plan's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan
from piper.runtime.launch.devices import device_facts
from piper.runtime.launch.pool_run import Reading
from piper.runtime.transport.transport import Exchange, Pending
from piper.runtime.worker.storages import measured_bytes
from piper.runtime.worker.worker import Worker


class _Alone:
    """The transport of a rank that has no peers."""

    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        raise AssertionError(f"{exchange.task.name} communicates, but there is one rank")


class SingleRun:
    reading: Reading = "driver"

    def __init__(self, plan: Plan, bodies: Mapping[str, str], *, compile: bool = False) -> None:
        if plan.mesh.size != 1:
            raise RunError(
                f"the plan has {plan.mesh.size} ranks", legal="launch local, or a plan of one rank"
            )
        self.worker = Worker(
            plan, 0, bodies=bodies, transport=_Alone(), device=plan.device, compile=compile
        )
        self.evaluating: Worker | None = None

    def step(self, leaves: Mapping[str, Tensor]) -> list[dict[str, float]]:
        return [self.worker.step(leaves)]

    def evaluate(
        self, plan: Plan, bodies: Mapping[str, str], leaves: Mapping[str, Tensor]
    ) -> list[dict[str, float]]:
        """Run an evaluation of the plan on its live parameters."""
        self.load(plan, bodies, "eval")
        assert self.evaluating is not None
        return [self.evaluating.step(leaves)]

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        if self.evaluating is None:
            self.evaluating = Worker(
                plan,
                0,
                bodies=bodies,
                transport=_Alone(),
                device=plan.device,
                shares=self.worker,
            )

    def set_options(self, options: Mapping[str, Any]) -> None:
        self.worker.set_options(options)

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return [{k: v.cpu() for k, v in self.worker.tensors(kind).items()}]

    def memory(self) -> list[dict[str, int]]:
        return [measured_bytes(self.worker)]

    def describe(self) -> list[dict[str, str]]:
        return [device_facts(self.worker.device)]

    def close(self) -> None:
        self.worker.slots.clear()
        self.evaluating = None
