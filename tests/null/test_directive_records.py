"""Directives as data: JSON, types of arguments, and what each one did to the graph."""

import inspect
import json
from typing import Any

import msgspec
import pytest

import piper
from piper import Schedule, where
from piper.cli.main import main
from piper.directives.recompute import KEEPS
from piper.directives.registry import SHIPPED, known_directives, read_directive
from piper.directives.replay_history import replay_history
from piper.directives.replicate import Replicate
from piper.directives.schedule import shown_signature
from piper.errors import ArgumentError, PlanError
from piper.ir.directive import AnyDirective, kind_of
from piper.ir.history import Effect, History, effect_of
from piper.plan.types import plan_from_json
from tests.null.test_history import everything
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("moe")


@pytest.fixture(scope="module")
def program() -> piper.Program:
    def strategy(s: Schedule) -> None:
        everything(s)
        s.recompute(where(PP=0), keep="expensive")

    return program_of("moe").apply(strategy)


def test_every_directive_reads_back_from_json(program: piper.Program) -> None:
    untagged = program_of("untagged").apply(lambda s: s.cut("PP", 2, costs={"stages.0": 1.0}))
    cut_in_blocks: Any = {"head.*": 1, "*.qkv.weight": [0, 3], "*.qkv.bias": (0, [16, 4, 4])}
    cut = program_of("moe").apply(
        lambda s: [
            s.mesh(tp=2),
            s.shard_tensor(where(), over="tp", params=cut_in_blocks, sequence={"tokens": 1}),
        ]
    )
    kinds = set()
    for record in (*program.history, *untagged.history, *cut.history):
        data = msgspec.json.decode(msgspec.json.encode(record.directive))
        again = read_directive(AnyDirective, data)
        assert again == record.directive and type(again) is type(record.directive)
        assert again.code() == record.directive.code()
        kinds.add(record.directive.kind)
    assert kinds == {kind_of(cls) for cls in SHIPPED}
    assert "'*.qkv.weight': (0, 3), '*.qkv.bias': (0, (16, 4, 4))" in cut.history_as_code()


def test_a_table_reads_back_from_json() -> None:
    strategy = piper.strategies.parallel(pp=2, microbatches=4, schedule="zb_h1")
    plan = program_of("moe").apply(strategy).lower().plan
    again = plan_from_json(plan.to_json())
    assert again.history == plan.history
    assert "schedule('zb_h1', num_ranks=2" in str(again.history[-1])


def test_the_json_of_a_directive_has_its_arguments_by_name() -> None:
    directive = Replicate(where(PP=0, EP=None), over=("dp", "ep"), zero=2)
    assert json.loads(msgspec.json.encode(directive)) == {
        "kind": "replicate",
        "selector": {"tags": [["PP", 0], ["EP", None]]},
        "over": ["dp", "ep"],
        "zero": 2,
    }


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "replicate", "selector": {}, "over": 3}, "Expected `str | array`, got `int`"),
        ({"kind": "replicate", "selector": {}}, "missing required field `over`"),
        ({"kind": "replicate", "selector": {}, "over": "dp", "x": 1}, "unknown field `x`"),
        ({"kind": "split", "selector": {}, "tag": "MB", "num": "2"}, "Expected `int`, got `str`"),
        ({"selector": {}}, "an object with a `kind`"),
        ("replicate", "an object with a `kind`"),
    ],
)
def test_data_that_is_no_directive(program: piper.Program, data: Any, words: str) -> None:
    plan = json.loads(program.lower().plan.to_json())
    plan["history"][0]["directive"] = data
    with pytest.raises(PlanError, match="not a Piper plan") as caught:
        plan_from_json(json.dumps(plan).encode())
    assert words in str(caught.value)


def test_effects_are_those_of_the_graphs(program: piper.Program) -> None:
    """Counted here from the graphs before and after each directive, by name."""
    graph = program_of("moe").graph
    for number, record in enumerate(program.history):
        s = Schedule(graph, program.history[:number])
        s.apply(record.directive, call=record.call)
        old, new = set(graph.nodes), set(s.graph.nodes)
        changed = {name for name in old & new if graph.nodes[name] != s.graph.nodes[name]}
        assert record.effect == Effect(len(new - old), len(old - new), len(changed)), record
        graph = s.graph
    by_kind = {record.directive.kind: record.effect for record in program.history}
    chunks = len(program_of("moe").graph.nodes)
    assert by_kind["split"] == Effect(added=2 * chunks, removed=chunks)
    assert by_kind["mesh"] == by_kind["stream"] == Effect()
    assert by_kind["recompute"].changed == len(program.graph.by_tag["PP", 0])


def test_halves_of_a_backward_come_and_their_whole_goes() -> None:
    def strategy(s: Schedule) -> None:
        s.split(where(), "MB", 2)
        s.order([where(PP=0, MB=0, phase="BI"), where(PP=0, MB=0, phase="BW")])

    program = program_of("moe").apply(strategy)
    backwards = [n for n in program_of("moe").graph.chunks if n.phase == "B" and n.tag("PP") == 0]
    effect = program.history[-1].effect
    assert effect == Effect(added=2 * len(backwards), removed=len(backwards))
    assert str(effect) == f"adds {2 * len(backwards)} nodes, removes {len(backwards)} nodes"


def test_listing_and_explain_say_what_a_directive_did(program: piper.Program) -> None:
    lines = program.history.listing().splitlines()
    assert len(lines) == len(program.history)
    assert lines[0].startswith("mesh = s.mesh(pp=2, dp=2, ep=2) ")
    assert "test_history.py:" in lines[0] and lines[0].endswith("changes no node")
    place = program.history[3]
    assert place.effect.changed > 0 and lines[3].endswith(str(place.effect))
    job = program.lower()
    sent = next(comm for comm in job.graph.comms if comm.comm == "send")
    origin = job.plan.history[sent.origin]
    assert f"{origin}  ({origin.call.source}; it {origin.effect})" in job.explain(sent.name)


def test_a_graph_with_nothing_new_has_no_effect() -> None:
    graph = program_of("moe").graph
    assert effect_of(graph, graph) == Effect() == effect_of(graph, graph.replacing({}))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda s: s.replicate(where()), "argument: 'over'"),
        (lambda s: s.replicate(where(), "dp"), "too many positional arguments"),
        (lambda s: s.split(where(), "MB", 2, 3), "too many positional arguments"),
        (lambda s: s.split(where(), "MB", number=2), "argument: 'num'"),
        (lambda s: s.recompute(where(), kep="nothing"), "'kep' (did you mean 'keep'?)"),
        (lambda s: s.mesh(2), "too many positional arguments"),
        (lambda s: s.stream("a", max_sms="4"), "max_sms='4'"),
        (lambda s: s.stream("a", priority="highest"), "priority='highest'"),
        (lambda s: s.cut(3, 2), "tag=3"),
    ],
)
def test_arguments_that_a_directive_does_not_take(strategy: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        program_of("untagged").apply(strategy)
    assert words in str(caught.value)
    assert "test_directive_records.py:" in str(caught.value)
    assert "  legal: s." in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_what_is_refused_leaves_the_schedule_as_it_was() -> None:
    s = Schedule(program_of("moe").graph)
    with pytest.raises(ArgumentError):
        s.stream("a", max_sms="4")  # type: ignore[arg-type]
    assert s.graph is program_of("moe").graph and s.history == []


def test_methods_have_the_signature_and_docstring_of_their_class() -> None:
    for kind, cls in known_directives().items():
        if cls in SHIPPED:
            method = getattr(Schedule, kind)
            taken = inspect.signature(getattr(cls, "of", cls))
            parameters = list(inspect.signature(method).parameters.values())
            assert parameters[1:] == list(taken.parameters.values())
            assert inspect.getdoc(method) == inspect.getdoc(cls) and method.__name__ == kind
    assert shown_signature("place", inspect.signature(known_directives()["place"])) == (
        "s.place(selector, at, *, stream=None)"
    )


def test_replay_gives_the_same_graph(program: piper.Program) -> None:
    assert replay_history(program_of("moe").graph, program.history) == program.graph
    assert program_of("moe").apply(History(program.history)).graph == program.graph


def test_an_evaluation_is_replayed_without_what_is_about_backwards(program: piper.Program) -> None:
    graph = replay_history(program_of("moe").graph, program.history, training=False)
    assert graph.orders == () and program.graph.orders != ()
    assert {chunk.recompute for chunk in graph.chunks} == {""}


def test_a_size_in_words_has_a_published_form() -> None:
    def strategy(s: Schedule) -> None:
        s.mesh(dp=2)
        s.replicate(where(), over="dp", bucket_size="25MiB")

    entries = json.loads(piper.strategies.to_json(program_of("moe").apply(strategy)))
    assert entries[0]["bucket_size"] == 25


def test_the_command_line_knows_all_that_recompute_may_keep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "x.py", "--recompute", "some"])
    said = capsys.readouterr().err
    assert len(KEEPS) == 4 and all(keep in said.partition("legal: ")[2] for keep in KEEPS)
