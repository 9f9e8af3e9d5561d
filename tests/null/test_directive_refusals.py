"""Arguments of the wrong type and orders that contradict each other: refused with their line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import piper
from piper.directives.schedule import Schedule
from piper.errors import PiperError
from piper.ir.select import where
from tests.loopback.programs import Two, mean_square, random_batch, two


@pytest.fixture(scope="module")
def program() -> piper.Program:
    def forward(self: Two, x: Any) -> Any:
        return self.run_stages(lambda: self.a(x), lambda h: self.b(h))

    return piper.trace(lambda: two(forward)().double(), random_batch(0), mean_square)


def _refused(program: piper.Program, strategy: Callable[[Schedule], None]) -> str:
    with pytest.raises(PiperError) as caught:
        program.apply(strategy)
    assert "test_directive_refusals.py:" in str(caught.value)
    return str(caught.value)


def _over_two(s: Schedule, **options: Any) -> None:
    s.mesh(dp=2)
    s.replicate(where(), over="dp", **options)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda s: s.mesh(dp="2"), "axis dp has size '2'"),
        (lambda s: s.mesh(dp=None), "axis dp has size None"),
        (lambda s: s.mesh(dp=2.0), "axis dp has size 2.0"),
        (lambda s: s.replicate(where(), over=3), "the mesh has no axis 3"),
        (lambda s: s.shard(where(), over=None), "the mesh has no axis None"),
        (lambda s: s.split(where(), "MB", "2"), "cannot split into 2"),
        (lambda s: s.split(where(), "MB", 1.5), "cannot split into 1.5"),
        (lambda s: s.split(where(), "MB", 10**12), "samples cannot be split into 1000000000000"),
        (lambda s: _over_two(s, zero=2, reuse=2), "reuse=2 with zero=2 (requirement 3)"),
        (lambda s: _over_two(s, zero=0, reuse=1), "reuse=1 with zero=0 (requirement 3)"),
        (lambda s: _over_two(s, zero=0, reduce_every=1), "reduce_every=1 with zero=0"),
        (lambda s: s.order(3), "3 is no list of groups"),
        (lambda s: s.order([where(), 3]), "something else than where"),
    ],
)
def test_arguments_of_the_wrong_type(
    program: piper.Program, strategy: Callable[[Schedule], None], words: str
) -> None:
    assert words in _refused(program, strategy)


def test_orders_that_contradict_each_other(program: piper.Program) -> None:
    def strategy(s: Schedule) -> None:
        s.split(where(), "MB", 3)
        s.order([where(MB=m, PP=0, phase="F") for m in (2, 0, 1)])
        s.order([where(MB=m, PP=0, phase="F") for m in (1, 2)])

    text = _refused(program, strategy)
    assert "orders contradict each other" in text
    assert "F[PP=0,MB=0]  before  F[PP=0,MB=1]  by order" in text
    assert "F[PP=0,MB=1]  before  F[PP=0,MB=2]  by order" in text


def test_groups_are_numbered_as_in_their_own_order(program: piper.Program) -> None:
    def strategy(s: Schedule) -> None:
        s.split(where(), "MB", 2)
        s.order([where(MB=0, PP=0, phase="B"), where(MB=0, PP=0, phase="F")])
        s.order([where(MB=1), where(MB=0, phase="F"), where(MB=0, phase="B")])

    text = _refused(program, strategy)
    assert "group 1  B[PP=0,MB=0]  needs  F[PP=0,MB=0]  of group 2" in text


def test_slices_that_differ_are_refused_where_they_are_placed(program: piper.Program) -> None:
    def shapes(s: Schedule) -> None:
        mesh = s.mesh(pp=2, dp=1)
        s.place(where(PP=0), mesh.at(pp=0))
        s.place(where(PP=1), mesh.at(dp=0))

    def phases(s: Schedule) -> None:
        mesh = s.mesh(pp=2)
        s.place(where(PP=0), mesh.at(pp=0))
        s.place(where(PP=1, phase="F"), mesh.at(pp=1))
        s.place(where(PP=1, phase="B"), mesh.at(pp=0))

    assert "slices of unequal shape: pp=0 and dp=0" in _refused(program, shapes)
    assert "F[PP=1] and B[PP=1] have pp=1 and pp=0" in _refused(program, phases)
    for strategy in (shapes, phases):
        assert _refused(program, strategy).startswith("place (")
