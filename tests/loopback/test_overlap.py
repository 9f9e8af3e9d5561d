"""Overlap groups: members take turns, and each one's communication is issued before the other's turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from piper import where
from piper.api.job import Job
from piper.directives.schedule import Schedule
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Comm, Node, Read
from piper.passes.lower import Lowering, run_passes
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("overlap")  # its jobs are made once

STRATEGY = parallel(pp=2, dp=2, ep=2, microbatches=4, schedule="dualpipev")


@cache
def _job() -> Job:
    return program_of("deep").apply(STRATEGY).lower(optimizer=ADAMW)


@cache
def _graph_for(device: str) -> Graph:
    """The dispatch order for a device; bodies are those of the CPU, which orders do not see."""

    def run_for(state: Lowering, **options: Any) -> Lowering:
        state.device = device
        return run_passes(state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("piper.compiler.driver.run_passes", run_for)
        # Its plan says that it is for a CPU, which has no multiprocessors to leave to communication.
        patch.setattr("piper.compiler.driver.check_plan", lambda plan, **_: None)
        return program_of("deep").apply(STRATEGY).lower().graph


def _member(graph: Graph, name: str) -> tuple[Any, ...]:
    node: Any = graph.nodes[name]
    return (node.tag("PP"), node.tag("MB"), node.phase == "F")


def _sources(graph: Graph, node: Node) -> set[str]:
    """The chunks whose results reach a node, through anything but chunks."""
    found: set[str] = set()
    stack, seen = [node.name], {node.name}
    while stack:
        for value in graph.nodes[stack.pop()].inputs:
            for name in graph.producers.get(value, ()):
                if isinstance(graph.nodes[name], Chunk):
                    found.add(name)
                elif name not in seen:
                    seen.add(name)
                    stack.append(name)
    return found


def _positions(graph: Graph) -> dict[str, int]:
    return {name: index for index, name in enumerate(graph.nodes)}


def _issued_behind(graph: Graph, turns: Sequence[str], index: int) -> list[Node]:
    """Exchanges, sends and reads that a turn makes possible: the others they need came before it."""
    at = graph.nodes[turns[0]].slice
    later = set(turns[index + 1 :])
    position = _positions(graph)
    found = []
    for node in graph.nodes.values():
        talks = isinstance(node, Read) or (
            isinstance(node, Comm) and node.comm in ("send", "all_to_all")
        )
        if not talks or node.slice != at:
            continue
        sources = _sources(graph, node)
        before = {s for s in sources if s not in turns and position[s] < position[turns[0]]}
        mine = {s for s in sources if s in turns and s not in later}
        if turns[index] in sources and mine | before == sources:
            found.append(node)
    return found


def _exchanged_behind(graph: Graph, turns: Sequence[str], index: int) -> list[Node]:
    """Without messages to other stages, which nobody here waits for."""
    behind = _issued_behind(graph, turns, index)
    return [node for node in behind if not (isinstance(node, Comm) and node.comm == "send")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_members_take_turns(device: str) -> None:
    """A turn lasts until a chunk that communication follows."""
    graph = _graph_for(device)
    assert len(graph.overlaps) >= 2 * 2  # on each rank
    for turns in graph.overlaps:
        members = [_member(graph, name) for name in turns]
        assert len(set(members)) == 2
        position = _positions(graph)
        assert sorted(turns, key=position.__getitem__) == list(turns)
        left = {member: members.count(member) for member in set(members)}
        for index, (one, other) in enumerate(pairwise(members)):
            left[one] -= 1
            over = one != other or 0 in left.values()
            assert over == (0 in left.values() or bool(_exchanged_behind(graph, turns, index)))


def test_on_cpu_all_communication_goes_before_the_other_ones_turn() -> None:
    graph = _graph_for("cpu")
    position = _positions(graph)
    kinds = set()
    for turns in graph.overlaps:
        for index, following in enumerate(turns[1:]):
            for node in _issued_behind(graph, turns, index):
                kinds.add(getattr(node, "comm", "read"))
                assert position[node.name] < position[following], (node.name, following)
    assert kinds == {"send", "all_to_all", "read"}


def test_on_cuda_only_counts_go_before_a_read_that_would_block_dispatch() -> None:
    """The host read, and the payload whose sizes it reads, come after the other's next chunk. Rows that
    come back, and gradients, travel by sizes that were read before."""
    graph = _graph_for("cuda")
    position = _positions(graph)
    early, late = set(), set()
    for turns in graph.overlaps:
        for index, following in enumerate(turns[1:]):
            behind = _issued_behind(graph, turns, index)
            read = {v for node in behind if isinstance(node, Read) for v in node.outputs}
            for node in behind:
                if isinstance(node, Read) or read & set(node.inputs):
                    late.add(node.name.partition(">")[0])
                    assert position[node.name] > position[following], (node.name, following)
                else:
                    early.add(node.name.partition(">")[0])
                    assert position[node.name] < position[following], (node.name, following)
    assert {"counts", "send"} <= early and late == {"read", "rows0"}
    assert any(name.startswith("BI[") for name in early) and any("F[" in name for name in early)


def test_a_read_is_behind_counts_and_not_behind_the_other_ones_turn() -> None:
    """On a stream of the exchange, so that the payload runs beside that turn."""
    graph = _graph_for("cuda")
    reads = [node for node in graph.nodes.values() if isinstance(node, Read)]
    assert reads and {node.stream for node in reads} == {"exchange"}


def test_the_plan_knows_its_groups() -> None:
    job = _job()
    for part in job.plan.classes:
        assert part.overlaps
        for group in part.overlaps:
            tasks = [part.tasks[i] for i in group]
            assert tasks[0].kind == tasks[-1].kind == "run"
            assert list(group) == list(range(group[0], group[-1] + 1))
            assert any(task.kind == "all_to_all" for task in tasks)


def test_counts_travel_once_per_region_and_microbatch() -> None:
    """Rows come back, and gradients travel, by the counts that the forward exchanged."""
    job = _job()
    for part in job.plan.classes:
        regions = {
            (node.tag("PP"), node.tag("EP"))
            for node in job.graph.chunks
            if node.slice == part.slice and node.tag("EP") is not None
        }
        exchanges = [task for task in part.tasks if task.kind == "all_to_all"]
        counts = [t for t in exchanges if part.slots[t.writes[0]].dtype == "int64"]
        reads = [task for task in part.tasks if task.kind == "read"]
        assert len(counts) == len(reads) == len(regions) * job.plan.num_microbatches > 0
        assert len(exchanges) == 5 * len(counts)  # rows there and back, forward and backward


def _pairs(ep: int) -> Any:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(ep=ep)
        s.place(where(), mesh.at())
        s.replicate(where(EP=None), over="ep")
        s.shard(where(EP="*"), over="ep")
        s.split(where(), "MB", 2)
        first, second = ([where(MB=i, phase=phase) for i in range(2)] for phase in ("F", "B"))
        s.order([first, second])

    return strategy


def test_without_communication_a_group_is_concatenation() -> None:
    """Taking turns would only keep more alive."""
    for ep, alternating in ((1, False), (2, True)):
        job = program_of("moe").apply(_pairs(ep)).lower(optimizer=ADAMW)
        (group, _) = job.graph.overlaps
        microbatches = [job.graph.nodes[name].tag("MB") for name in group]
        changes = sum(one != other for one, other in pairwise(microbatches))
        assert (changes > 1) == alternating
        batches = batches_of("moe")[:1]
        with job.launch("loopback", adversary=True) as run:
            assert compare(run, batches, train_one_device(job, batches)).exact
