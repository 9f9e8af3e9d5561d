"""PoolRun: a plan on a pool of members, wherever those run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

from piper.errors import RunError
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.failure.failure import Failure, as_error
from piper.runtime.launch.reading import Data, place_of, reference
from piper.runtime.launch.shares import share_of

Message = tuple[str, Any]
# Who reads batches: this process for all ranks, each rank's own process, or this one for its rank.
Reading = Literal["driver", "members", "rank"]


class Pool(Protocol):
    """Members that wait for commands; many plans, one after another."""

    num_ranks: int
    device: str

    def ask(self, messages: list[Message]) -> list[Any]:
        """Give each rank its command and collect all answers. A Failure ends the pool."""

    def close(self) -> None: ...


class PoolRun:
    """A plan on a pool, which is closed with the run if it was made for it."""

    reading: Reading = "members"

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
        self.plans: dict[str, Plan] = {}  # all that are loaded, by role
        self.options = {"compile": compile}
        self._set: dict[str, Any] = {}  # what optimizers are set to with the next step
        self.ranks: dict[str, list[RankPlan]] = {}
        self._data: dict[str, str] = {}  # by role: what the ranks read
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
        """Have every rank get ready for a plan, unless it is."""
        if self.plans.get(name) is plan:
            return
        payload = {
            "name": name, "plan": plan.to_json(), "bodies": dict(bodies), **self.options
        }  # fmt: skip
        self.plans[name] = plan
        hashes = self.ask([("load", payload)] * plan.mesh.size)
        if set(hashes) != {plan.content_hash()}:
            raise RunError(f"ranks hold different plans: {sorted(set(hashes))}")
        self.ranks[name] = [bind(plan, rank) for rank in range(plan.mesh.size)]

    def ask(self, messages: list[Message]) -> list[Any]:
        try:
            return self.pool.ask(messages)
        except Failure as failure:
            self.close()
            command, payload = messages[0]
            if command in ("read", "fetch"):
                name = payload if command == "fetch" else payload["name"]
                failure.facts["data"] = self._data[name]
            raise as_error(failure, self.plans) from None

    def step(
        self, leaves: Mapping[str, Tensor] | None, *, trace: str | None = None
    ) -> list[dict[str, float]]:
        """One step; with `trace`, a folder that gets what torch's profiler saw on each rank."""
        options, self._set = self._set, {}
        messages = self._steps("train", leaves, options)
        return self.ask([(name, {**payload, "trace": trace}) for name, payload in messages])

    def evaluate(
        self, plan: Plan, bodies: Mapping[str, str], leaves: Mapping[str, Tensor] | None
    ) -> list[dict[str, float]]:
        """Run an evaluation of the plan on its live parameters."""
        self.load(plan, bodies, "eval")
        return self.ask(self._steps("eval", leaves, {}))

    def _steps(
        self, name: str, leaves: Mapping[str, Tensor] | None, options: dict[str, Any]
    ) -> list[Message]:
        messages: list[Message] = []
        for me in self.ranks[name]:
            mine = None
            if leaves is not None:
                share = share_of(self.plan, leaves, me.data_rank)
                used = {slot.source for slot in me.slots if slot.kind == "batch"}
                # A view would be sent with the memory of the whole batch.
                mine = {k: v.clone() for k, v in share.items() if k in used}
            messages.append(("step", {"name": name, "leaves": mine, "options": options}))
        return messages

    def set_options(self, options: Mapping[str, Any]) -> None:
        """With the next step optimizers get these values; they travel with it."""
        self._set |= options

    def read(self, function: Data, name: str = "train") -> None:
        """Have every rank that needs batches read its share from a function, from the start."""
        payload = {"name": name, "function": reference(function)}
        self._data[name] = place_of(function)
        self.ask([("read", payload)] * self.plan.mesh.size)

    def fetch(self, name: str = "train") -> bool:
        """Have every rank read its next batch; False if the data has ended, for all of them."""
        found = self.ask([("fetch", name)] * self.plan.mesh.size)
        ended = [rank for rank, has in enumerate(found) if has is False]
        more = [rank for rank, has in enumerate(found) if has]
        check_ends(more, ended)
        return bool(more)

    def describe(self) -> list[dict[str, str]]:
        return self.ask([("describe", None)] * self.plan.mesh.size)

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self.ask([("tensors", kind)] * self.plan.mesh.size)

    def memory(self) -> list[dict[str, int]]:
        return self.ask([("memory", None)] * self.plan.mesh.size)

    def close(self) -> None:
        if self.own_pool:
            self.pool.close()


def check_ends(more: list[int], ended: list[int]) -> None:
    """Raise if some ranks have a next batch and others have none."""
    if more and ended:
        raise RunError(
            f"the data of {_ranks(ended)} has ended, that of {_ranks(more)} has not",
            legal="data functions that give every share the same number of batches",
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
