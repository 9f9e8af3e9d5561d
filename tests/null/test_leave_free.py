"""Chunks beside which communication is expected leave it multiprocessors, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from piper import Schedule, where
from piper.check import check_plan
from piper.cost.machine import Machine
from piper.errors import CheckError
from piper.ir.communication import LEFT, MOST_LEFT
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.passes import lower
from piper.passes.dispatch.leave_free import _received, _Talks
from piper.plan.report.explain import explain
from piper.plan.tasks import Run
from piper.plan.types import Plan
from piper.strategies import parallel
from tests.loopback.test_lanes import shared_link
from tests.zoo import program_of

SLOW, FAST = shared_link(bandwidth=1e6), shared_link(bandwidth=1e15)


def _lowered(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    machine: Machine,
    name: str = "deep",
    device: str = "cpu",
) -> tuple[Graph, Plan]:
    """What the pass makes of a graph, as for a card, of which there is none here; ordered for a
    device."""
    graphs: list[Graph] = []
    inner = lower.PASSES[[each.name for each in lower.PASSES].index("room")]

    def room(state: lower.Lowering) -> None:
        on_card = replace(state, device="cuda")
        on_card.physical = state.physical
        inner.run(on_card)
        graphs.append(on_card.graph)

    def for_device(run: Callable[[lower.Lowering], None]) -> Callable[[lower.Lowering], None]:
        def wrapped(state: lower.Lowering) -> None:
            state.device, before = device, state.device
            run(state)
            state.device = before

        return wrapped

    other = {"room": room, "bind": for_device(lower._bind), "orders": for_device(lower._order)}
    passes = tuple(each._replace(run=other.get(each.name, each.run)) for each in lower.PASSES)
    monkeypatch.setattr(lower, "PASSES", passes)
    job = program_of(name).apply(strategy).lower(machine=machine)
    return graphs[-1], job.plan


def _chunks(graph: Graph, **tags: int) -> list[Chunk]:
    return [n for n in graph.chunks if all(dict(n.tags)[tag] == i for tag, i in tags.items())]


def test_backwards_beside_reductions_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = parallel(dp=2, zero=1, microbatches=4, bucket_size=300)
    graph, plan = _lowered(monkeypatch, strategy, SLOW)
    last = [n for n in _chunks(graph, MB=3) if n.phase == "B"]
    assert {n.leaves for n in last} == {0, LEFT}  # nothing is reduced before the first of them ends
    assert not any(n.leaves for n in graph.chunks if n not in last)
    assert not any(getattr(task, "leaves", 0) for part in plan.classes for task in part.tasks)


def test_a_fast_link_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = parallel(dp=2, zero=1, microbatches=4, bucket_size=300)
    machine = msgspec.structs.replace(FAST, node=msgspec.structs.replace(FAST.node, latency=0.0))
    graph, _ = _lowered(monkeypatch, strategy, machine)
    assert not any(n.leaves for n in graph.chunks)


def test_a_stream_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(dp=2)
        s.place(where(), mesh.at())
        s.replicate(where(), over="dp", reduce_stream=s.stream("mine", max_sms=12), bucket_size=300)
        s.split(where(), "MB", 4)

    graph, _ = _lowered(monkeypatch, strategy, SLOW)
    assert {n.leaves for n in graph.chunks} == {0, 12}


def test_both_ends_of_a_message_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = _lowered(monkeypatch, parallel(pp=2, microbatches=4), SLOW)
    for stage in range(2):
        assert any(n.leaves for n in graph.chunks if n.slice and dict(n.slice.fixed)["pp"] == stage)


def test_chunks_that_take_turns_leave_room_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that is dispatched behind the other's chunk runs beside it: where it was taken to run
    after it, a third of all turns left room."""
    strategy = parallel(pp=2, dp=2, ep=2, microbatches=8, schedule="dualpipev")
    graph, _ = _lowered(monkeypatch, strategy, SLOW, name="deep_moe", device="cuda")
    turns = {name for group in graph.overlaps for name in group}
    leaving = [graph.nodes[name].leaves > 0 for name in turns]  # type: ignore[attr-defined]
    assert len(leaving) > 20 and sum(leaving) > len(leaving) / 2


def test_a_part_of_a_stream_and_a_bound_beyond_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound, left in (("mine:x", 12, 12), ("mine", 5000, MOST_LEFT)):

        def strategy(s: Schedule, name: str = name, bound: int = bound) -> None:
            mesh = s.mesh(dp=2)
            s.place(where(), mesh.at())
            stream = s.stream(name, max_sms=bound)
            s.replicate(where(), over="dp", reduce_stream=stream, bucket_size=300)
            s.split(where(), "MB", 4)

        with monkeypatch.context() as patch:
            graph, _ = _lowered(patch, strategy, SLOW)
        assert {n.leaves for n in graph.chunks} == {0, left}


def test_a_message_is_received_while_it_is_sent() -> None:
    assert _received((2.0, 3.0), free=0.0, ready=3.0) == (2.0, 3.0)
    assert _received((2.0, 3.0), free=2.5, ready=3.0) == (2.5, 3.5)
    assert _received((2.0, 3.0), free=0.0, ready=7.0) == (7.0, 8.0)


def test_what_counts_as_beside() -> None:
    talks = _Talks([(0.0, 1.0, 4), (0.5, 2.0, 8), (10.0, 11.0, 2)])
    assert talks.left_by(0.0, 0.4) == 8  # both are one stretch of communication
    assert talks.left_by(1.9, 3.0) == 0  # a tenth of the time
    assert talks.left_by(1.0, 4.0) == 8
    assert talks.left_by(9.0, 12.0) == 2
    assert talks.left_by(3.0, 9.0) == 0


@pytest.mark.parametrize(("device", "leaves"), [("cuda", -1), ("cuda", 5000), ("cpu", 4)])
def test_impossible_numbers_are_refused(device: str, leaves: int) -> None:
    plan = program_of("deep").apply(parallel(dp=2)).lower().plan
    part = plan.classes[0]
    index = next(i for i, task in enumerate(part.tasks) if isinstance(task, Run))
    task = msgspec.structs.replace(part.tasks[index], leaves=leaves)
    tasks = (*part.tasks[:index], task, *part.tasks[index + 1 :])
    wrong = msgspec.structs.replace(part, tasks=tasks)
    with pytest.raises(CheckError, match=f"leaves {leaves} multiprocessors"):
        check_plan(msgspec.structs.replace(plan, device=device, classes=(wrong,)))


def test_explain_says_it() -> None:
    plan = program_of("deep").apply(parallel(dp=2)).lower().plan
    part = plan.classes[0]
    index = next(i for i, task in enumerate(part.tasks) if isinstance(task, Run))
    task = msgspec.structs.replace(part.tasks[index], leaves=6)
    tasks = (*part.tasks[:index], task, *part.tasks[index + 1 :])
    told = msgspec.structs.replace(plan, classes=(msgspec.structs.replace(part, tasks=tasks),))
    assert "leaves   6 multiprocessors" in explain(told, task.name)
