"""A collective and a task kind that the package does not have, added from here.

A collective is a row of `ir/communication.py` and a function in each transport that moves bytes
(`transport/loopback.py`, `transport/distributed.py`): three files. A task kind is a node
(`ir/nodes.py`), a type (`plan/tasks.py`), a rule that makes the one of the other
(`passes/dispatch/node_tasks.py`), a handler (`runtime/worker/handlers.py`) and, if it has requirements
of its own, a rule in `check/proofs/structure.py`: five files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

import piper
from piper.api.job import Job
from piper.bodies.leaves import batch_leaves
from piper.check import check_plan, problems
from piper.check.proofs import structure
from piper.cost.estimate import NodeSeconds
from piper.errors import PiperError, PlanError, RunError
from piper.ir import nodes as ir
from piper.ir.communication import (
    COMMUNICATION,
    CommunicationKind,
    add_communication,
    communication,
    same_tensor,
)
from piper.ir.graph import Graph
from piper.ir.well_formed import verify
from piper.mesh import Group
from piper.passes.dispatch.emit import emit
from piper.passes.dispatch.node_tasks import RULES, Numbering, task_of
from piper.passes.physical.buckets import Bucketed
from piper.plan.report.diff import diff
from piper.plan.report.explain import explain
from piper.plan.report.plan_text import plan_to_text
from piper.plan.report.volume import communication as volume
from piper.plan.tasks import NO_SLOT, TASKS, Task, task_kind
from piper.plan.types import Plan, plan_from_json
from piper.runtime.transport import distributed, loopback
from piper.runtime.transport.transport import Exchange
from piper.runtime.worker.handlers import HANDLERS, Start, handles
from piper.strategies import parallel
from tests.loopback import pools
from tests.loopback.programs import mean_square, random_batch, two
from tests.tasks import comm


def _broadcast_row() -> CommunicationKind:
    return CommunicationKind(
        "broadcast",
        "collective",
        "same",
        fits=lambda source, result, ranks, by_host: same_tensor(source, result),
        carries=lambda brought, ranks: float(brought),
        keeps_layout=True,
    )


def _broadcast_here(round: loopback.Round) -> list[torch.Tensor]:
    return [round.brought[round.ranks[0]].clone() for _ in round.ranks]


def _broadcast_there(
    transport: Any, exchange: Exchange, tensor: Any, splits: Any, into: Any, group: Any
) -> distributed.Work:
    into = transport.empty(exchange) if into is None else into
    into.copy_(tensor)
    first, aside = exchange.ranks[0], transport.aside
    work = torch.distributed.broadcast(into, first, group=group, async_op=aside)
    return distributed.Work(work, into, keep=tensor)


class ScaleNode(ir._Node, frozen=True, omit_defaults=True, kw_only=True, tag="scale"):
    """A Value times a number."""

    by: float


class Scale(Task, frozen=True, kw_only=True, omit_defaults=True, tag="scale"):
    """A slot times a number."""

    source: int
    target: int
    by: float

    READS = ("source",)
    WRITES = ("target",)


def _scale_task(node: ScaleNode, at: Numbering, common: dict[str, Any]) -> Scale:
    (source,), (target,) = at.slots(node.inputs), at.slots(node.outputs)
    return Scale(source=source, target=target, by=node.by, **common)


def _scale(worker: Any, task: Scale) -> Start:
    def start() -> None:
        worker.slots[task.target] = worker.slots[task.source] * task.by

    return start


def _wrong_scale(plan: Plan, party: Any, task: Scale) -> str:
    return "" if task.by else "scales by nothing"


@pytest.fixture
def added() -> Iterator[None]:
    """Both kinds, as a package of somebody else's would add them."""
    add_communication(_broadcast_row())
    loopback.COLLECTIVES["broadcast"] = _broadcast_here
    distributed.COLLECTIVES["broadcast"] = _broadcast_there
    task_kind(Scale)
    task_of(ScaleNode)(_scale_task)
    handles(Scale)(_scale)
    structure.RULES[Scale] = _wrong_scale
    yield
    for table in (COMMUNICATION, loopback.COLLECTIVES, distributed.COLLECTIVES):
        table.pop("broadcast", None)  # type: ignore[attr-defined]
    for table in (RULES, HANDLERS, structure.RULES):
        table.pop(ScaleNode if table is RULES else Scale, None)  # type: ignore[attr-defined]
    TASKS.pop("scale", None)


@pytest.fixture(scope="module")
def job() -> Job:
    make = two(lambda self, x: self.run_stages(lambda: self.a(x), lambda h: self.b(self.c(h))))
    program = piper.trace(lambda: make().double(), random_batch(0), mean_square)
    strategy = parallel(pp=2, dp=2, microbatches=2)
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-2))


def _with_both(graph: Graph) -> Graph:
    """Every backward's seed, 1, is halved, broadcast and doubled: nothing changes but the plan."""
    nodes: dict[str, Any] = {}
    values = dict(graph.values)
    for node in graph.nodes.values():
        seeds = [v for v in node.inputs if graph.values[v].role == "constant"]
        if isinstance(node, ir.Chunk) and seeds:
            (seed,) = seeds
            common = {"slice": node.slice, "tags": node.tags}
            names = [seed, *(f"{step}>{node.name}" for step in ("half", "sent", "whole"))]
            for name in names[1:]:
                values[name] = msgspec.structs.replace(
                    values[seed], name=name, role="activation", of=""
                )
            half, sent, whole = (
                {"name": f"do.{b}", "inputs": (a,), "outputs": (b,), **common}
                for a, b in pairwise(names)
            )
            group = Group((node.slice,), ("dp",))
            nodes["1"] = ScaleNode(by=0.5, **half)
            nodes["2"] = ir.Comm(
                comm="broadcast", group=group, key=sent["name"], stream="broadcasts", **sent
            )
            nodes["3"] = ScaleNode(by=2.0, **whole)
            for number in "123":
                made = nodes.pop(number)
                nodes[made.name] = made
            inputs = tuple(names[-1] if v == seed else v for v in node.inputs)
            node = msgspec.structs.replace(node, inputs=inputs)
        nodes[node.name] = node
    return msgspec.structs.replace(graph, nodes=nodes, values=values)


def _plan(job: Job, graph: Graph) -> Plan:
    classes, streams, groups = emit(graph, Bucketed(job.plan.buckets, (), {}))
    return msgspec.structs.replace(job.plan, classes=classes, streams=streams, groups=groups)


def _train(plan: Plan, job: Job, **options: Any) -> list[list[dict[str, float]]]:
    engine = pools.loopback(plan, job.bodies, **options)
    return [engine.step(batch_leaves(random_batch(seed))) for seed in range(3)]


def test_a_collective_and_a_task_kind_of_somebody_elses(job: Job, added: None) -> None:
    graph = _with_both(job.graph)
    verify(graph)
    plan = _plan(job, graph)
    kinds = [task.kind for part in plan.classes for task in part.tasks]
    assert kinds.count("broadcast") == 2 and kinds.count("scale") == 4
    report = check_plan(plan)
    assert report.num_collectives == job.report.num_collectives + 2
    assert plan_from_json(plan.to_json()) == plan
    assert _train(plan, job) == _train(job.plan, job) == _train(plan, job, adversary=True)

    first = next(task for task in plan.classes[-1].tasks if task.kind == "broadcast")
    assert "broadcast" in plan_to_text(plan) and "scale" in plan_to_text(plan)
    assert "kind     broadcast on stream broadcasts" in explain(plan, first.name)
    assert "only in B: 2 broadcast" in diff(job.plan, plan)
    assert volume(plan, plan.classes[-1])["broadcasts", "broadcast"] == (2, 16)
    assert NodeSeconds(graph, {})(graph.nodes[first.name]) > 0


def test_the_added_kinds_are_proved_like_all_others(job: Job, added: None) -> None:
    plan = _plan(job, _with_both(job.graph))

    def changed(kind: str, **changes: Any) -> Plan:
        part = plan.classes[-1]
        tasks = list(part.tasks)
        index = next(i for i, task in enumerate(tasks) if task.kind == kind)
        tasks[index] = msgspec.structs.replace(tasks[index], **changes)
        part = msgspec.structs.replace(part, tasks=tuple(tasks))
        return msgspec.structs.replace(plan, classes=(*plan.classes[:-1], part))

    wrong = {
        "scales by nothing": changed("scale", by=0.0),
        "a slot that does not exist": changed("scale", source=10**6),
        "but does not wait for": changed("broadcast", waits=()),
        "cannot make": changed("broadcast", source=0),
        "does not bring and leave": changed("broadcast", target=NO_SLOT),
    }
    assert problems(plan) == []
    for words, mutant in wrong.items():
        found = problems(mutant)
        assert found and any(words in problem.message for problem in found), (words, found)


def test_what_nobody_has_added_is_refused_by_name_everywhere(job: Job) -> None:
    graph = _with_both(job.graph)
    plan = job.plan
    part, tasks = plan.classes[0], plan.classes[0].tasks
    unknown = comm("broadcast", "news", 0, source=0, target=1)

    def refused(words: str, kind: type[PiperError], call: Any, *arguments: Any) -> None:
        with pytest.raises(kind, match=words):
            call(*arguments)

    refused("no communication is called 'broadcast'", PlanError, communication, "broadcast")
    refused("no communication is called 'broadcast'", PlanError, verify, graph)
    node = next(node for node in graph.comms if node.comm == "broadcast")
    refused("no communication is called 'broadcast'", PlanError, NodeSeconds(graph, {}), node)
    refused("no rule makes a task of a ScaleNode", PlanError, _plan, job, graph)
    for task, words in (
        (unknown, "is a communication 'broadcast', which does not exist"),
        (Scale(name="s", stream=0, source=0, target=0, by=1.0), "is of kind 'scale'"),
    ):
        mutant = msgspec.structs.replace(part, tasks=(*tasks, task))
        mutant = msgspec.structs.replace(plan, classes=(mutant, *plan.classes[1:]))
        (problem,) = problems(mutant)
        assert problem.proof == "structure" and words in problem.message
        if task is not unknown:
            refused(
                "no Worker runs a task of kind 'scale'",
                RunError,
                pools.loopback,
                mutant,
                job.bodies,
            )
            refused("not a Piper plan: .*scale", PlanError, plan_from_json, mutant.to_json())
        else:
            refused("no communication is called", PlanError, pools.loopback, mutant, job.bodies)


def test_a_transport_without_a_kind_says_so(job: Job) -> None:
    """The table may know what a transport does not."""
    exchange = Exchange(comm("broadcast", "news", 0, source=0, target=1), Any, 0, (0, 1), ())  # type: ignore[arg-type]
    here = loopback.LoopbackTransport()
    there = object.__new__(distributed.DistributedTransport)
    add_communication(_broadcast_row())
    try:
        for transport in (here, there):
            with pytest.raises(RunError, match=r"transport has no 'broadcast'.*\n.*all_reduce"):
                transport.start(exchange, torch.ones(1), None, None)
    finally:
        COMMUNICATION.pop("broadcast")
