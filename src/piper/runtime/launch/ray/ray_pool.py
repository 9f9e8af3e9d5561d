"""RayPool: one actor of Ray per rank, in a placement group over the nodes of a cluster."""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from piper.errors import RunError
from piper.mesh import Mesh
from piper.runtime.failure.board import Board
from piper.runtime.failure.failure import Failure, as_error, first_cause
from piper.runtime.failure.patience import START_SECONDS, Patience
from piper.runtime.launch.local_pool import (
    GRACE_SECONDS,
    LOOK_SECONDS,
    Report,
    survivors_of,
)
from piper.runtime.launch.pool import Reading
from piper.runtime.launch.ray.node_placement import assign, check_axes
from piper.runtime.launch.ray.ray_cluster import connect, load_ray
from piper.runtime.launch.ray.ray_member import RayMember

PLACE_SECONDS = 60.0
EXIT_SECONDS = 10.0
RESTARTS, RESTART_SECONDS = 3, 2.0
LOST_SECONDS = 20.0  # Ray sees the end of a node later than the ranks that were connected to it


class RayPool:
    """Actors that wait for plans of their number of ranks; many plans, one after another.

    `address` is a cluster to join; without one, see `connect`. `near` names an axis of `mesh` whose
    ranks should share a node, `spread` one whose neighbours should not. A step in which no rank gets
    further for `timeout` seconds has failed: the actors end, and `restart` starts others in the same
    place. `report` is told what becomes of each rank.
    """

    reading: Reading = "members"
    sends = True

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        address: str | None = None,
        near: str | None = None,
        spread: str | None = None,
        mesh: Mesh | None = None,
        timeout: float = 120.0,
        report: Report | None = None,
        num_cpus: float = 1,
    ) -> None:
        check_axes(mesh, near=near, spread=spread)
        if mesh is not None and mesh.size != num_ranks:
            raise RunError(f"the mesh {mesh} has {mesh.size} ranks, the pool {num_ranks}")
        self.num_ranks = num_ranks
        self.device = device
        self.mesh = mesh or Mesh((("rank", num_ranks),))
        self.near, self.spread = near, spread
        self.timeout = timeout
        self.report = report or (lambda rank, text: None)
        self.spares = False  # whether other ranks live on when one is lost
        self.board = Board(num_ranks)  # as far as it was looked at
        self.actors: list[Any] = []
        self.processes: list[int] = []
        self.nodes: list[str] = []  # per rank, as are their addresses
        self.ips: list[str] = []
        self._resources = {"CPU": num_cpus} | ({"GPU": 1} if device == "cuda" else {})
        self._group: Any = None
        self._looks: dict[int, Any] = {}
        self.ray = load_ray()
        self._own = connect(address, num_cpus=math.ceil(num_ranks * num_cpus))
        try:
            self._reserve()
            self._start()
        except Failure as failure:
            self.close(kill=True)
            raise as_error(failure, {}) from None
        except BaseException:
            self.close(kill=True)
            raise

    def _reserve(self) -> None:
        strategy = "SPREAD" if self.spread else "PACK"
        bundles = [self._resources] * self.num_ranks
        self._group = self.ray.util.placement_group(bundles, strategy=strategy)

    def _place(self) -> tuple[list[int], dict[str, str]]:
        """The bundle of each rank and the address of each node, once all bundles have a node."""
        if not self._group.wait(PLACE_SECONDS):
            asked = {name: amount * self.num_ranks for name, amount in self._resources.items()}
            there, free = self.ray.cluster_resources(), self.ray.available_resources()
            nodes = sum(node["Alive"] for node in self.ray.nodes())
            raise RunError(
                f"the Ray cluster has no room for {self.num_ranks} ranks within {PLACE_SECONDS:g} s",
                details=[
                    f"{name}: {amount:g} asked for, {there.get(name, 0):g} on {nodes} nodes, "
                    f"{free.get(name, 0):g} of them free"
                    for name, amount in asked.items()
                ],
                legal="a larger cluster, fewer ranks, or a smaller num_cpus",
            )
        table = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        nodes = [table[bundle] for bundle in range(self.num_ranks)]
        bundles = assign(self.mesh, nodes, near=self.near, spread=self.spread)
        self.nodes = [nodes[bundle] for bundle in bundles]
        return bundles, {n["NodeID"]: n["NodeManagerAddress"] for n in self.ray.nodes()}

    def _start(self) -> None:
        """One actor per rank, which meet."""
        bundles, addresses = self._place()
        actor = self.ray.remote(concurrency_groups={"watch": 1})(RayMember)
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self.ips = [addresses[node] for node in self.nodes]
        self.actors = [
            actor.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=place(self._group, placement_group_bundle_index=bundle),
            ).remote(rank, ip)
            for rank, (bundle, ip) in enumerate(zip(bundles, self.ips, strict=True))
        ]
        device = self.device if self.device == "cpu" else "cuda:0"  # Ray shows each its own card
        self.processes = self.call("start", [device] * self.num_ranks)
        port, *_ = self.call("open", [START_SECONDS] * self.num_ranks)
        joining = {
            "num_ranks": self.num_ranks,
            "timeout": START_SECONDS,
            "meet": (self.ips[0], port),
        }
        self.call("join", [joining] * self.num_ranks)

    @property
    def alive(self) -> bool:
        return bool(self.actors)

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.num_ranks)

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        """Give each rank its command and collect all answers; any failure ends the actors."""
        if not self.alive:
            raise RunError("the actors have ended", legal="pool.restart(), or launch again")
        try:
            sent: dict[int, Any] = {}  # equal messages travel once
            for payload in payloads:
                if id(payload) not in sent:
                    message = self.ray.cloudpickle.dumps((command, payload))
                    sent[id(payload)] = self.ray.put(message)
            answers = {
                actor.answer.remote(sent[id(payload)]): rank
                for rank, (actor, payload) in enumerate(zip(self.actors, payloads, strict=True))
            }
            return self._collect(answers, command)
        except Failure as failure:
            if not (self.spares and failure.is_loss):
                self._end(kill=True)
            raise
        except BaseException:
            self._end(kill=True)
            raise

    def ask(self, command: str, payloads: Mapping[int, Any]) -> dict[int, Any]:
        """What ranks answer that a failure has left, of those that do within the time."""
        sent = {
            self.actors[rank].answer.remote(self.ray.cloudpickle.dumps((command, payload))): rank
            for rank, payload in payloads.items()
        }
        ready, _ = self.ray.wait(list(sent), num_returns=len(sent), timeout=self.timeout)
        answers = {sent[one]: self._answer(sent[one], one) for one in ready}
        return {rank: found for rank, (status, found) in answers.items() if status == "ok"}

    def _collect(self, ranks: dict[Any, int], command: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        patience = Patience.of(self.board, command, self.timeout)
        deadline, looked = float("inf"), time.monotonic()
        self._looks.clear()
        while ranks and time.monotonic() < deadline:
            ready, _ = self.ray.wait(list(ranks), timeout=LOOK_SECONDS)
            for reference in ready:
                rank = ranks.pop(reference)
                status, answers[rank] = self._answer(rank, reference)
                if status != "ok":
                    facts = {"command": command, **answers[rank]}
                    failures.append(Failure(status, rank, facts))
                    wait = LOST_SECONDS if status == "lost" else GRACE_SECONDS
                    deadline = min(deadline, time.monotonic() + wait)
                elif command == "start":
                    self._report_up(rank, answers[rank])
            if ranks and time.monotonic() - looked >= LOOK_SECONDS:
                self._look(ranks.values())
                looked = time.monotonic()
            hang = patience.over(ranks.values())
            if hang and not failures:
                failures.append(Failure("hangs", -1, {**hang, "command": command}))
                break
        if failures:
            self._look(ranks.values())
            cause = first_cause(failures, self.board.snapshot())
            cause.survivors = survivors_of(answers, failures)
            raise cause
        return [answers[rank] for rank in range(self.num_ranks)]

    def _report_up(self, rank: int, process: int) -> None:
        node = f"{self.nodes[rank][:8]} ({self.ips[rank]})"
        self.report(rank, f"is up: process {process} on node {node}")

    def _look(self, waiting: Collection[int]) -> None:
        """Note where ranks are. One that does not answer stays where it was seen last."""
        for rank in waiting:
            if rank not in self._looks:
                where = self.actors[rank].where.options(concurrency_group="watch")
                self._looks[rank] = where.remote()
        looks = {self._looks[rank]: rank for rank in waiting}
        if not looks:
            return
        ready, _ = self.ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_SECONDS)
        for reference in ready:
            status, where = self._get(self._looks.pop(looks[reference]))
            if status == "ok":
                self._note(looks[reference], where)

    def _note(self, rank: int, where: list[int]) -> None:
        cells = self.board.cells(rank)
        for field, number in enumerate(where):
            cells[field] = number

    def _answer(self, rank: int, reference: Any) -> tuple[Any, Any]:
        status, found = self._get(reference)
        if status == "ok":
            status, found, where = pickle.loads(found)
            self._note(rank, where)
        return status, found

    def _get(self, reference: Any) -> tuple[Any, Any]:
        """What a call gave, or how it failed."""
        try:
            return "ok", self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            return "died", {"reason": _reason(str(error))}
        except self.ray.exceptions.RayError as error:
            return "error", {"error": str(getattr(error, "cause", None) or error)}

    def restart(self) -> None:
        """Fresh actors in the same placement group, ready for a plan. Where a node has ended, Ray moves
        the group's part of it to another."""
        if self._group is None:
            raise RunError("the pool is closed", legal="a new RayPool")
        self._end(kill=True)
        for left in reversed(range(RESTARTS)):
            try:
                self._start()
                return
            except Failure as failure:
                if not left or failure.kind != "died":
                    raise as_error(failure, {}) from None
            time.sleep(RESTART_SECONDS)  # until Ray knows that a node is gone, and has another one

    def _end(self, *, kill: bool) -> None:
        """End all actors; `kill` does not wait for work under way."""
        actors, self.actors, self.processes = self.actors, [], []
        self._looks.clear()
        if actors and not kill:
            leaving = [actor.leave.remote() for actor in actors]
            self.ray.wait(leaving, num_returns=len(leaving), timeout=EXIT_SECONDS)
        for actor in actors:
            self.ray.kill(actor)

    def close(self, *, kill: bool = False) -> None:
        """End all actors, give back their place, and end what `connect` made."""
        if self.ray.is_initialized():
            self._end(kill=kill)
            if self._group is not None:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.util.remove_placement_group(self._group)
            if self._own:
                self.ray.shutdown()
        self._group, self._own, self.actors = None, False, []

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reason(text: str) -> str:
    """What Ray says of an actor's end, in a few words."""
    if "unavailable" in text:
        return "it cannot be reached, as when its node has ended"
    found = re.search(r"because (.+?)\.(?:\s|$)", text, re.DOTALL)
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text, re.DOTALL)
    reason = found[1] if found else text.strip().splitlines()[0]
    return f"{reason} ({detail[1].strip()})" if detail else reason
