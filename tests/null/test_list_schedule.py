"""List scheduling: queues are looked at about once per node, however many nodes wait for one."""

from typing import Any

import pytest

from piper.cost.estimate import NodeSeconds
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.mesh import Slice
from piper.passes.dispatch import list_schedule

NODES = 2000


def test_waiting_nodes_do_not_wake_their_queue_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {
        name: Chunk(name=name, phase="F", chunk=0, tags=(("MB", i),), slice=Slice())
        for i, name in ((i, f"F[MB={i}]") for i in range(NODES))
    }
    looks = 0
    advance = list_schedule._Simulation._advance

    def counted(simulation: Any, *place: Any) -> None:
        nonlocal looks
        looks += 1
        advance(simulation, *place)

    monkeypatch.setattr(list_schedule._Simulation, "_advance", counted)
    whole = Graph("physical", nodes, {})
    graph = list_schedule.schedule(whole, NodeSeconds(whole, {})).graph
    assert list(graph.nodes) == list(nodes)
    assert looks <= 2 * NODES  # with a wake per node that waits: two million
