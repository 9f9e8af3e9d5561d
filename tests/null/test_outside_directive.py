"""A directive that is defined outside of the package, in one class: all that works for Piper's own."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import piper
from piper import Schedule, where
from piper.directives.registry import known_directives
from piper.errors import ArgumentError, MeshError, StrategyError
from piper.ir.directive import Selecting, Site, Unknown
from piper.ir.graph import Graph
from piper.ir.history import Effect
from piper.ir.select import select
from piper.plan.types import plan_from_json
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("deep")


class Speak(Selecting, frozen=True, kw_only=True):
    """Messages of the selected chunks travel on a stream.

    Requires:
        1. The stream is declared.
    """

    on: str

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        if self.on not in [stream.name for stream in graph.streams]:
            raise MeshError(f"no stream {self.on!r}", call=site.call, requirement=1)
        names = select(graph, self.selector, call=site.call)
        changed: Any = {
            name: msgspec.structs.replace(graph.nodes[name], transfer=self.on) for name in names
        }
        return graph.replacing(changed)


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2, dp=2)
    for stage in range(4):
        s.place(where(PP=stage), mesh.at(pp=stage // 2))
    s.stream("fast")
    s.speak(where(PP=2), on="fast")
    s.replicate(where(), over="dp", zero=2, bucket_size=600)
    s.split(where(), "MB", 2)


@pytest.fixture(scope="module")
def program() -> piper.Program:
    return program_of("deep").apply(strategy)


def test_it_is_a_method_with_its_signature_and_docstring() -> None:
    s = Schedule(program_of("deep").graph)
    assert str(inspect.signature(s.speak)) == "(selector: piper.ir.select.Selector, *, on: str)"
    assert inspect.getdoc(s.speak) == inspect.getdoc(Speak)
    assert "speak" in dir(s) and known_directives()["speak"] is Speak
    with pytest.raises(AttributeError, match=r"'speek' \(did you mean 'speak'\?\)"):
        s.speek(where(), on="fast")
    with pytest.raises(ArgumentError, match=r"test_outside_directive.py:\d+\): missing .*'on'"):
        s.speak(where())
    with pytest.raises(MeshError, match=r"speak \(.*test_outside_directive.py:\d+\): no stream"):
        s.speak(where(), on="fast")


def test_it_is_recorded_printed_and_pasted(program: piper.Program) -> None:
    record = program.history[6]
    assert record.directive == Speak(where(PP=2), on="fast")
    assert str(record) == "s.speak(where(PP=2), on='fast')"
    assert record.effect == Effect(changed=6)  # the stage has 3 chunks, each F and B
    names: dict[str, Any] = {}
    exec(program.history_as_code(), names)
    assert program_of("deep").apply(names["strategy"]).graph == program.graph


def test_it_is_replayed_on_finer_chunks_and_reaches_the_plan(program: piper.Program) -> None:
    job = program.lower()
    assert len(job.graph.chunks) > len(program.graph.chunks)
    streams = {c.stream.partition(":")[0] for c in job.graph.comms if c.comm in ("send", "recv")}
    assert "fast" in streams
    assert plan_from_json(job.plan.to_json()) == job.plan
    assert plan_from_json(job.plan.to_json()).history[6].directive == Speak(where(PP=2), on="fast")


def test_it_has_no_published_form(program: piper.Program) -> None:
    with pytest.raises(StrategyError, match=r"speak \(.*no such directive in the published form"):
        piper.strategies.to_json(program)


READER = """
import sys
from piper.plan.types import plan_from_json
data = open(sys.argv[1], "rb").read()
plan = plan_from_json(data)
print(plan.history[6], type(plan.history[6].directive).__name__, plan.to_json() == data)
"""


def test_a_process_without_the_class_keeps_what_it_reads(
    program: piper.Program, tmp_path: Path
) -> None:
    """As workers do, who never see the user's strategy."""
    (tmp_path / "plan.json").write_bytes(program.lower().plan.to_json())
    command = [sys.executable, "-c", READER, str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    code = "s.speak(selector={'tags': [['PP', 2]]}, on='fast')"
    assert (done.stdout, done.stderr) == (f"{code} Unknown True\n", "")


def test_what_nobody_knows_is_refused_by_name_when_it_is_applied(program: piper.Program) -> None:
    unknown = Unknown({"kind": "whisper", "on": "fast"})
    records = [msgspec.structs.replace(program.history[6], directive=unknown)]
    with pytest.raises(StrategyError, match=r"no directive is called 'whisper' here") as caught:
        program_of("deep").apply(records)
    assert "s.whisper(on='fast')" in str(caught.value)


def test_nobody_takes_the_name_of_a_directive() -> None:
    class Replicate(Selecting, frozen=True):
        def rewrite(self, graph: Graph, site: Site) -> Graph:
            return graph

    assert known_directives()["replicate"] is not Replicate
