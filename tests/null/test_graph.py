"""The graph: text and JSON parse back, selectors select, history names the user's lines."""

import msgspec
import pytest

import piper
from piper import where
from piper.errors import Call, PlanError, SelectError
from piper.ir.form.graph_text import graph_from_text, graph_to_text
from piper.ir.form.serial import graph_from_json, graph_to_json
from piper.ir.graph import Graph
from piper.ir.history import history_as_code
from piper.ir.nodes import Chunk
from piper.ir.select import select
from piper.ir.well_formed import verify
from piper.plan.types import plan_from_json
from tests.strategies import strategy_of
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("skip")


@pytest.fixture(scope="module")
def graphs() -> list[Graph]:
    """One program at every level: traced, under directives, physical."""
    program = program_of("skip")
    applied = program.apply(strategy_of("pp2_ep2", "1f1b"))
    return [program.graph, applied.graph, applied.lower().graph]


def test_text_and_json_parse_back(graphs: list[Graph]) -> None:
    for graph in graphs:
        assert graph_from_text(graph_to_text(graph)) == graph
        assert graph_from_json(graph_to_json(graph)) == graph


def test_text_that_is_no_graph_is_refused_with_its_line() -> None:
    with pytest.raises(PlanError, match="line 2"):
        graph_from_text("graph logical\nnonsense here\n")
    with pytest.raises(PlanError, match="of version 99 is not readable"):
        graph_from_json(b'{"level":"logical","nodes":{},"values":{},"version":99}')


def test_selectors(graphs: list[Graph]) -> None:
    graph, call = graphs[1], Call("test")
    assert select(graph, where(PP=0, EP=None, MB=1, phase="F"), call=call) == [
        "F[PP=0.0,MB=1]",
        "F[PP=0.1,MB=1]",
    ]
    experts = select(graph, where(EP="*", MB=0), call=call)
    assert len(experts) == 4 and all("EP=" in name for name in experts)
    assert len(select(graph, where(), call=call)) == len(graph.nodes)
    with pytest.raises(SelectError, match="no phase 'X'"):
        where(phase="X")
    physical = select(graphs[2], where(comm="all_to_all", PP=1, MB=0), call=call)
    assert len(physical) == 5  # counts, rows and results forward, rows and results backward


def test_order_may_name_communication() -> None:
    """A Comm is ordered like a chunk, and the plan says so with a wait."""

    def strategy(s: piper.Schedule) -> None:
        strategy_of("ep2", "none")(s)
        s.order([where(PP=0, EP=None, MB=1, phase="F"), where(comm="all_to_all", PP=0, MB=0)])

    tasks = program_of("skip").apply(strategy).lower().plan.classes[0].tasks
    names = [task.name for task in tasks]
    first = next(i for i, n in enumerate(names) if "all_to_all" in tasks[i].kind and "MB=0" in n)
    before = names.index("F[PP=0.2,MB=1]")
    assert before < first
    assert before in tasks[first].waits

    def wrong(s: piper.Schedule) -> None:
        s.order([where(comm="all_to_all"), where(PP=0)])

    with pytest.raises(SelectError, match=r"order \(.*test_graph.*selects nothing"):
        program_of("skip").apply(wrong).lower()


def test_faults_are_found(graphs: list[Graph]) -> None:
    graph = graphs[2]
    verify(graph)
    node = next(n for n in graph.nodes.values() if isinstance(n, Chunk))
    broken = msgspec.structs.replace(node, inputs=("nothing", *node.inputs))
    with pytest.raises(PlanError, match="a Value that does not exist"):
        verify(msgspec.structs.replace(graph, nodes={**graph.nodes, node.name: broken}))
    send = next(n for n in graph.comms if n.comm == "send")
    left = {name: n for name, n in graph.nodes.items() if name != send.name}
    with pytest.raises(PlanError, match="read but never written"):
        verify(msgspec.structs.replace(graph, nodes=left))


def test_history_names_the_users_lines_and_pastes_back() -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2)
        for stage in range(2):
            s.place(where(PP=stage), mesh.at(pp=stage))
        s.split(where(), "MB", 2)

    program = program_of("skip").apply(strategy)
    assert [str(record) for record in program.history] == [
        "mesh = s.mesh(pp=2)",
        "s.place(where(PP=0), mesh.at(pp=0))",
        "s.place(where(PP=1), mesh.at(pp=1))",
        "s.split(where(), 'MB', 2)",
    ]
    assert all("test_graph.py" in str(record.call.source) for record in program.history)

    names: dict[str, object] = {}
    exec(history_as_code(program.history), names)
    assert program_of("skip").apply(names["strategy"]).graph == program.graph  # type: ignore[arg-type]


def test_a_plan_is_the_same_bytes_every_time_and_parses_back() -> None:
    plans = [
        program_of("skip").apply(strategy_of("pp2_ep2", "1f1b")).lower().plan for _ in range(2)
    ]
    assert plans[0].to_json() == plans[1].to_json()
    assert plan_from_json(plans[0].to_json()) == plans[0]
    with pytest.raises(PlanError, match="not a Piper plan"):
        plan_from_json(b"{}")


def test_directives_commute() -> None:
    def forwards(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2, dp=2)
        for stage in range(2):
            s.place(where(PP=stage), mesh.at(pp=stage))
        s.replicate(where(), over="dp")
        s.split(where(), "MB", 2)

    def backwards(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2, dp=2)
        s.split(where(), "MB", 2)
        s.replicate(where(), over="dp")
        for stage in (1, 0):
            s.place(where(PP=stage), mesh.at(pp=stage))

    plans = [program_of("skip").apply(strategy).lower().plan for strategy in (forwards, backwards)]
    for one, other in zip(plans[0].classes, plans[1].classes, strict=True):
        assert [t.name for t in one.tasks] == [t.name for t in other.tasks]
        assert [(t.waits, t.frees) for t in one.tasks] == [(t.waits, t.frees) for t in other.tasks]
