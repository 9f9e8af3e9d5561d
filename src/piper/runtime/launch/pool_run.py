"""PoolRun: a plan on a pool of members, wherever those run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from piper.bodies.files.registrations import registering_modules
from piper.errors import RunError
from piper.ir.tensor_type import Shapes
from piper.plan.holdings import holdings
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.failure.failure import Failure, as_error
from piper.runtime.launch.marks import Mark
from piper.runtime.launch.pool import Pool, Reading
from piper.runtime.launch.read_faults import ReadFaults, ReadPolicy
from piper.runtime.launch.reader import Fetched, fits, num_rows
from piper.runtime.launch.reading import Data, module_reference, place_of, reference
from piper.runtime.launch.shares import agreed_shapes, rows_of
from piper.runtime.record.recorder import RankTimes
from piper.runtime.state.given import Giver, elsewhere
from piper.runtime.torch_optimizers import checked_options
from piper.runtime.worker.weights import elements_of
from piper.runtime.worker.worker import Worker
from piper.stored.stored_pieces import StoredState
from piper.stored.weight_files import Place
from piper.stored.writers import Entry

Ranks = Sequence[int] | None  # those that a failure has left; None while there was none


class PoolRun:
    """A plan on a pool, which is closed with the run if it was made for it. One that `rehearses` runs
    all tasks but moves no bytes: its numbers mean nothing, its times do."""

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        pool: Pool | Callable[[], Pool],
        *,
        stored: StoredState | None = None,
        memory: Mapping[str, Tensor] | None = None,
        compile: bool = False,
        rehearses: bool = False,
    ) -> None:
        self.own_pool = callable(pool)
        self.pool: Pool = pool() if callable(pool) else pool
        self.plan = plan
        self.bodies = bodies
        self.plans: dict[str, Plan] = {}  # all that are loaded, by role
        self.options = {"compile": compile, "rehearses": rehearses}
        self.in_memory = memory  # of that, what lies in this process
        self.failed = False  # whether a rank has: then none is asked again
        self.stored = stored  # what the run starts from, if not from the model's own code
        self._set: list[
            dict[str, Any]
        ] = []  # what each parameter group is set to with the next step
        self.now: list[dict[str, Any]] = [{} for _ in plan.param_groups]  # all that was set
        self.ranks: dict[str, list[RankPlan]] = {}  # by role, of the ranks that this process drives
        self._data: dict[str, str] = {}  # by role: what the ranks read
        self.marks: dict[str, Mark] = {}  # by role: where the ranks stand in it
        self.read_faults: dict[str, ReadFaults] = {}  # by role
        try:
            self._check()
            self.load(plan, bodies, "train")
        except BaseException:
            self.close()
            raise

    @property
    def reading(self) -> Reading:
        return self.pool.reading

    @property
    def workers(self) -> list[Worker]:
        """The Workers of ranks in this process."""
        members: Any = getattr(self.pool, "members", ())
        return [member.workers["train"] for member in members]

    def _check(self) -> None:
        plan, pool = self.plan, self.pool
        if pool.num_ranks != plan.mesh.size:
            raise RunError(f"the pool has {pool.num_ranks} ranks, the plan {plan.mesh.size}")
        if pool.device != plan.device:
            raise RunError(f"the pool is on {pool.device}, the plan is for {plan.device}")

    def call(self, command: str, payload: Any = None) -> list[Any]:
        """What every rank answers to a command, which is a method of Member."""
        return self._call(command, [payload] * len(self.pool.ranks))

    def _call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        try:
            return self.pool.call(command, payloads)
        except Failure as failure:
            self.failed = True
            if not (failure.survivors and self.spares):
                self.close()
            if command in ("read", "fetch"):
                name = payloads[0] if command == "fetch" else payloads[0]["name"]
                failure.facts["data"] = self._data[name]
            raise as_error(failure, self.plans) from None

    def load(self, plan: Plan, bodies: Mapping[str, str], name: str) -> None:
        """Have every rank get ready for a plan of this role, unless it is."""
        if self.plans.get(name) is plan:
            return
        sent = plan.to_json() if self.pool.sends else plan
        self.plans[name] = plan
        payload: dict[str, Any] = {
            "name": name,
            "plan": sent,
            "bodies": dict(bodies),
            **self.options,
        }
        if self.pool.sends:  # what registers the operators that bodies call
            modules = registering_modules(bodies.values())
            files = ((module.__name__, getattr(module, "__file__", None)) for module in modules)
            payload["imports"] = [module_reference(m, file) for m, file in files if file]
        self._call("load", self._with_start(payload, plan))
        if self.reading != "driver":
            hashes = set(self.call("plan_hash", name))
            if hashes != {plan.content_hash()}:
                raise RunError(f"ranks hold different plans: {sorted(hashes)}")
        self.ranks[name] = [bind(plan, rank) for rank in self.pool.ranks]

    def _with_start(self, payload: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
        """A payload per rank: the first plan's with what the ranks start from. What lies in this process
        is cut for ranks in others."""
        first, ranks = plan is self.plan, self.pool.ranks
        if self.stored is None:
            return [payload] * len(ranks)
        if first:
            sent = elsewhere(self.stored) if self.pool.sends else self.stored
            payload["stored"] = msgspec.json.encode(sent)
        if not self.in_memory:
            return [payload] * len(ranks)
        if not self.pool.sends:
            return [{**payload, "memory": self.in_memory}] * len(ranks)
        giver = Giver(plan, self.stored, self.in_memory)
        if first:
            return [{**payload, "given": giver.all_of(rank)} for rank in ranks]
        known = ({held.tensor for held in holdings(self.plan, rank)} for rank in ranks)
        pairs = zip(ranks, known, strict=True)
        return [{**payload, "given": giver.without(rank, known=k)} for rank, k in pairs]

    def step(
        self,
        leaves: Mapping[str, Tensor] | None,
        *,
        role: str = "train",
        trace: str | None = None,
        guard: str = "",
    ) -> list[dict[str, Any]]:
        """Train on leaves of the global batch, or on None: what the ranks have read themselves. With
        `trace`, a folder gets what torch's profiler saw on each rank. With the `guard` "skip" nothing
        changes if gradients are not finite; with "check" such a step is run again, changes nothing
        either, and says where they come from."""
        options, self._set = self._set, []
        more = {"options": options, "trace": trace, "reader": "train", "guard": guard}
        return self._call("step", self._steps(role, leaves, **more))

    def begin(self, leaves: Mapping[str, Tensor] | None, *, role: str = "train") -> None:
        """Have a step begin, without waiting for its end; `finish` does, of the one begun first."""
        options, self._set = self._set, []
        more: dict[str, Any] = {"options": options, "trace": None, "reader": "train", "ahead": True}
        self._call("step", self._steps(role, leaves, **more))

    def finish(self) -> list[dict[str, Any]]:
        return self._call("step", [None] * len(self.pool.ranks))

    def evaluate(
        self, leaves: Mapping[str, Tensor] | None, *, role: str = "eval"
    ) -> list[dict[str, Any]]:
        """Run an evaluation, which is loaded, on live parameters."""
        more: dict[str, Any] = {"options": [], "trace": None, "reader": "eval"}
        return self._call("step", self._steps(role, leaves, **more))

    def of_all(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of all ranks, of which a process of torchrun has its own."""
        pool: Any = self.pool
        return pool.gather(results[0], "step") if self.reading == "rank" else results

    def _steps(
        self, name: str, leaves: Mapping[str, Tensor] | None, **more: Any
    ) -> list[dict[str, Any]]:
        """A payload per rank, with its rows of the leaves that it reads."""
        payloads = []
        for me in self.ranks[name]:
            mine: dict[str, Tensor] | None = None
            if leaves is not None:
                used = {slot.source for slot in me.slots if slot.kind == "batch"}
                rows = rows_of(self.plans[name], leaves, me.data_rank)
                mine = {key: leaf for key, leaf in rows.items() if key in used}
                if self.pool.sends:  # a view would be sent with the memory of the whole batch
                    mine = {key: leaf.clone() for key, leaf in mine.items()}
            elif self.reading == "rank":
                mine = {}  # it needs none
            payloads.append({"name": name, "leaves": mine, **more})
        return payloads

    def set_options(self, options: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """With the next step parameter groups get these values, all the same or each its own; they
        travel with it."""
        groups = self.plan.param_groups
        several = isinstance(options, list | tuple)
        given: list[Any] = [*options] if several else [options] * len(groups)
        if len(given) != len(groups):
            raise RunError(
                f"options of {len(given)} parameter groups, but the plan has {len(groups)}",
                legal="one mapping for all, or a list with one for each",
            )
        each = [checked_options(*pair) for pair in zip(groups, given, strict=True)]
        before = self._set or [{} for _ in each]
        self._set = [{**old, **new} for old, new in zip(before, each, strict=True)]
        self.now = [{**old, **new} for old, new in zip(self.now, each, strict=True)]

    def read(
        self,
        function: Data,
        name: str = "train",
        *,
        marks: Sequence[Mark] = (),
        policy: ReadPolicy | None = None,
    ) -> None:
        """Have every rank that needs batches read its share from a function: from the start, or from
        the mark of its data rank."""
        self.read_faults[name] = ReadFaults(policy or ReadPolicy())
        self._data[name] = place_of(function)
        payload = {"name": name, "function": reference(function), "marks": list(marks)}
        self.call("read", {**payload, "policy": policy})

    def fetch(self, name: str = "train") -> Shapes:
        """Have every rank read its next batch: the shapes of the global one; nothing if the data has
        ended, for all of them. A batch that some cannot read is left out by all, and so is one that the
        policy leaves out for its size."""
        faults = self.read_faults[name]
        while True:
            shapes = self._fetch(name, faults)
            if not shapes or fits(self.plan, faults.policy, num_rows(shapes)):
                return shapes
            faults.partial.append(num_rows(shapes))

    def _fetch(self, name: str, faults: ReadFaults) -> Shapes:
        while True:
            answers: dict[int, Fetched] = {
                rank: found for rank, found in enumerate(self.call("fetch", name)) if found
            }
            faults.retried += sum(found.retried for found in answers.values())
            failures = {rank: found.failure for rank, found in answers.items() if found.failure}
            if not failures:
                break
            faults.leave_out(failures)
        first = next(iter(answers.values()), None)
        faults.partial += first.partial if first else ()
        more = {rank: found.shapes for rank, found in answers.items() if found.shapes}
        check_ends(list(more), [rank for rank in answers if rank not in more])
        if not more:
            return ()
        self.marks[name] = answers[next(iter(more))].mark
        return agreed_shapes(more)

    def record(self, role: str, steps: int | None) -> None:
        """Have the tasks of a loaded plan note their times, in the coming `steps` steps or more."""
        self.call("record", {"name": role, "steps": steps})

    def recorded(self) -> list[RankTimes]:
        """What they have noted on each rank; then they are as before."""
        return self.call("recorded")

    def drop_recording(self) -> None:
        """Have the tasks of all ranks be as before, whichever of them note their times."""
        self.call("drop_recording")

    def describe(self) -> list[dict[str, str]]:
        return self.call("describe")

    def tensors(self, kind: str) -> list[dict[str, Tensor]]:
        return self.call("tensors", kind)

    def bytes_read(self) -> list[int]:
        return self.call("bytes_read")

    def lend(self, whole: Mapping[str, Tensor]) -> None:
        """Have the ranks' parameters hold other values, of which each is sent its elements."""
        payloads = [
            {
                held.key: elements_of(whole[held.tensor], held).clone()
                for held in holdings(self.plan, rank)
                if held.what == "param" and held.tensor in whole
            }
            for rank in self.pool.ranks
        ]
        self._call("lend", payloads)

    def take_back(self) -> None:
        self.call("take_back")

    @property
    def spares(self) -> bool:
        """Whether ranks live on when another one is lost."""
        return bool(getattr(self.pool, "spares", False))

    def spare_survivors(self) -> None:
        """From now on, where the pool can."""
        pool: Any = self.pool
        if hasattr(pool, "spares"):
            pool.spares = True

    def save(
        self, entries: Sequence[Sequence[Entry]], folder: str, ranks: Ranks = None
    ) -> list[Any]:
        """Have every rank, or those that are left, write its entries into a folder, beside the work;
        seconds that each took to begin."""
        payloads = {
            rank: {"entries": msgspec.json.encode(entries[rank]), "folder": folder}
            for rank in (self.pool.ranks if ranks is None else ranks)
        }
        return self._told("save", payloads, ranks)

    def saved(self, ranks: Ranks = None) -> list[dict[str, Any]] | None:
        """What they have written; None as long as one is not done."""
        payloads = dict.fromkeys(self.pool.ranks if ranks is None else ranks)
        answers = self._told("saved", payloads, ranks)
        return None if any(answer is None for answer in answers) else answers

    def settled_steps(self, ranks: Sequence[int]) -> set[int | None]:
        """How many steps those that are left have done all of; -1 in the middle of one's changes."""
        return set(self._told("settled", dict.fromkeys(ranks), ranks))

    def _told(self, command: str, payloads: Mapping[int, Any], ranks: Ranks) -> list[Any]:
        """What every rank answers, or those that are left of a failure."""
        if ranks is None:
            return self._call(command, list(payloads.values()))
        pool: Any = self.pool
        try:
            answers: dict[int, Any] = pool.ask(command, payloads)
        except Failure as failure:
            raise as_error(failure, self.plans) from None
        if len(answers) < len(payloads):
            missing = sorted(set(payloads) - set(answers))
            raise RunError(f"{_ranks(missing)} did not answer either")
        return [answers[rank] for rank in payloads]

    def write_weights(
        self, entries: Sequence[Sequence[Entry]], places: Mapping[str, Place], folder: str
    ) -> list[str]:
        """Have every rank write its entries into files of a folder; what each could not."""
        sent = msgspec.json.encode(dict(places))
        payloads = [
            {"entries": msgspec.json.encode(entries[rank]), "places": sent, "folder": folder}
            for rank in self.pool.ranks
        ]
        return self._call("write_weights", payloads)

    def memory(self) -> list[dict[str, int]]:
        return self.call("memory")

    def close(self) -> None:
        pool: Any = self.pool
        if self.own_pool and self.failed and self.spares:
            pool.close(kill=True)  # ranks that still wait for the lost one would not hear
        elif self.own_pool:
            pool.close()


def check_ends(more: list[int], ended: list[int]) -> None:
    """Raise if some ranks have a next batch and others have none."""
    if more and ended:
        raise RunError(
            f"the data of {_ranks(ended)} has ended, that of {_ranks(more)} has not",
            legal="data functions that give every share the same number of batches",
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
