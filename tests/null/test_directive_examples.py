"""The examples in the directives' docstrings run."""

import doctest
import importlib

import pytest

import piper
from piper.api.stages import Stages
from piper.directives.schedule import Schedule
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("moe")


@pytest.mark.parametrize("name", ["cut", "place", "replicate", "shard", "split", "order"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"piper.directives.{name}")
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found
    for test in found:
        program = program_of("untagged" if name == "cut" else "moe")
        s = Schedule(program.graph, stages=Stages(program.source, None))
        mesh = s.mesh(pp=2, dp=2, ep=2)
        test.globs = {"s": s, "mesh": mesh, "where": piper.where, "piper": piper}
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", ["cut", "place", "replicate", "shard", "split", "order"])
def test_docstrings_have_requirements_and_a_rewrite(name: str) -> None:
    function = getattr(importlib.import_module(f"piper.directives.{name}"), name)
    for part in ("Requires:", "Rewrite:", "Example:"):
        assert part in function.__doc__
