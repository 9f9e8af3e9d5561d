"""PoolRun: a plan on a pool of members, wherever those run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan, bind
from piper.runtime.failure import Failure, as_error
from piper.runtime.shares import share_of

Message = tuple[str, Any]


class Pool(Protocol):
    """Members that wait for commands; many plans, one after another."""

    num_ranks: int
    device: str

    def ask(self, messages: list[Message]) -> list[Any]:
        """Give each rank its command and collect all answers. A Failure ends the pool."""

    def close(self) -> None: ...


class PoolRun:
    """A plan on a pool, which is closed with the run if it was made for it."""

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        pool: Pool | Callable[[], Pool],
        *,
        compile: bool = False,
    ) -> None:
        self.own_pool = callable(pool)
        self.pool: Pool = pool() if callable(pool) else pool
        self.plan = plan
        self.options = {"compile": compile}
        self.ranks = [bind(plan, rank) for rank in range(plan.mesh.size)]
        try:
            self._check()
            self.load(plan, bodies, "train")
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        plan, pool = self.plan, self.pool
        if pool.num_ranks != plan.mesh.size:
            raise RunError(f"the pool has {pool.num_ranks} ranks, the plan {plan.mesh.size}")
        if pool.device != plan.device:
            raise RunError(f"the pool is on {pool.device}, the plan is for {plan.device}")

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        """Have every rank get ready for a plan."""
        payload = {
            "name": name, "plan": plan.to_json(), "bodies": dict(bodies), **self.options
        }  # fmt: skip
        hashes = self.ask([("load", payload)] * plan.mesh.size)
        if set(hashes) != {plan.content_hash()}:
            raise RunError(f"ranks hold different plans: {sorted(set(hashes))}")

    def ask(self, messages: list[Message]) -> list[Any]:
        try:
            return self.pool.ask(messages)
        except Failure as failure:
            self.close()
            raise as_error(failure, self.plan) from None

    def step(self, leaves: Mapping[str, Tensor]) -> list[dict[str, float]]:
        messages = []
        for me in self.ranks:
            share = share_of(self.plan, leaves, me.data_rank)
            used = {slot.source for slot in me.slots if slot.kind == "batch"}
            # A view would be sent with the memory of the whole batch.
            mine = {k: v.clone() for k, v in share.items() if k in used}
            messages.append(("step", {"leaves": mine}))
        return self.ask(messages)

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self.ask([("tensors", kind)] * self.plan.mesh.size)

    def memory(self) -> list[dict[str, int]]:
        return self.ask([("memory", None)] * self.plan.mesh.size)

    def close(self) -> None:
        if self.own_pool:
            self.pool.close()
