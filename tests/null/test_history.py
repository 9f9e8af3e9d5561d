"""The history of a program, printed as code: what it makes is the same plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import piper
from piper import Schedule, where
from piper.api.program import Program
from piper.plan.types import Plan
from piper.strategies import parallel
from tests.strategies import strategy_of
from tests.zoo import program_of

MOE = pytest.mark.xdist_group("moe")
STRATEGIES = [
    ("one", "none"), ("dp2", "none"), ("ep2", "none"), ("pp2", "gpipe"), ("pp2", "zb_h1"),
    ("pp2_dp2", "1f1b"), ("pp2_ep2", "1f1b"), ("pp2_dp2_ep2", "zb_h2"),
]  # fmt: skip


def without_history(plan: Plan) -> str:
    return msgspec.structs.replace(plan, history=()).content_hash()


def pasted(program: Program) -> Callable[[Schedule], None]:
    names: dict[str, Any] = {}
    exec(compile(program.history_as_code(), "pasted.py", "exec"), names)
    return names["strategy"]


def assert_round_trip(name: str, strategy: Callable[[Schedule], None]) -> None:
    program = program_of(name).apply(strategy)
    again = program_of(name).apply(pasted(program))
    assert again.history_as_code() == program.history_as_code()
    assert without_history(again.lower().plan) == without_history(program.lower().plan)


@MOE
@pytest.mark.parametrize(("strategy", "schedule"), STRATEGIES)
def test_shipped_strategies(strategy: str, schedule: str) -> None:
    assert_round_trip("moe", strategy_of(strategy, schedule))


def everything(s: Schedule) -> None:
    """All directives with all that they take."""
    mesh = s.mesh(pp=2, dp=2, ep=2)
    dp, ep = s.stream("dp"), s.stream("ep", priority="high", max_sms=24)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.replicate(where(EP=None), over=("dp", "ep"), reduce_stream=dp)
    s.replicate(where(EP="*"), over="dp", reduce_stream=dp)
    s.shard(where(EP="*"), over=["ep"], stream=ep)  # type: ignore[arg-type]
    s.split(where(), "MB", 2)
    s.order(
        [
            where(PP=1, MB=0, phase="F"),
            [where(PP=1, MB=1, phase="F"), where(PP=1, MB=0, phase="B")],
            (where(PP=1, MB=1, phase="B"),),
        ]
    )
    s.order(where(PP=0, MB=m, phase="F") for m in range(2))  # type: ignore[arg-type]


@MOE
def test_all_arguments_of_all_directives() -> None:
    assert_round_trip("moe", everything)
    code = program_of("moe").apply(everything).history_as_code()
    assert "    s.stream('ep', priority='high', max_sms=24)\n" in code
    assert "    s.split(where(), 'MB', 2)\n" in code
    assert "s.order([where(PP=0, MB=0, phase='F'), where(PP=0, MB=1, phase='F')])" in code


@MOE
def test_a_table_of_the_users_own(tmp_path: Path) -> None:
    rows = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    (tmp_path / "mine.csv").write_text(rows)
    strategy = parallel(pp=2, schedule=str(tmp_path / "mine.csv"))
    assert "parse_csv('0F0,0F1" in program_of("moe").apply(strategy).history_as_code()
    assert_round_trip("moe", strategy)


@pytest.mark.xdist_group("deep")
def test_tables_on_several_regions_and_with_pairs() -> None:
    assert_round_trip("deep", parallel(pp=2, microbatches=4, schedule="gpipe"))
    assert_round_trip("deep", parallel(pp=2, microbatches=4, schedule="looped_bfs"))

    def renamed(s: Schedule) -> None:
        mesh = s.mesh(stage=2)
        for region in range(4):
            s.place(where(PP=region), mesh.at(stage=region // 2))
        s.split(where(), "PIECE", 4)
        table = piper.schedules.gpipe(num_ranks=2, num_microbatches=4)
        s.order(table, axis="stage", microbatch="PIECE", stages=[(0, 1), (2, 3)])

    assert_round_trip("deep", renamed)


@MOE
def test_a_place_without_a_mesh_and_no_directive_at_all() -> None:
    assert_round_trip("moe", lambda s: s.place(where(), piper.Mesh().at()))
    assert_round_trip("moe", lambda s: None)


def test_names_that_are_no_python() -> None:
    selector = where(PP=0, **{"my-tag": None, "class": "*"})
    assert str(selector) == "where(PP=0, **{'my-tag': None, 'class': '*'})"
    assert eval(str(selector)) == selector


@MOE
def test_the_history_prints_as_code_and_is_a_tuple_of_records() -> None:
    program = program_of("moe").apply(strategy_of("dp2", "none"))
    assert str(program.history) == repr(program.history) == program.history_as_code()
    assert isinstance(program.history, tuple) and program.history[0].call.name == "mesh"
    assert program.lower().plan.history == program.history
