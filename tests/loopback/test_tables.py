"""Tables of a user's own as the order of a strategy: they train like one device, or are refused."""

from pathlib import Path

import pytest

from piper import where
from piper.directives.schedule import Schedule
from piper.errors import OrderError, ScheduleError
from piper.schedules import SCHEDULES, Table, parse_csv, read_table, schedule
from piper.strategies import parallel
from piper.training.verify import compare
from tests.zoo import ADAMW, PIECES, batches_of, program_of, reference_of

TABLES = Path(__file__).parents[1] / "null" / "conformance" / "tables"
# Published tables: of F and B, two of them with fused cells; of BI and BW; V-shaped; overlapped.
PUBLISHED = [
    "jaxpp_kimik2", "jaxpp_interleaved1f1b", "torch_LoopedBFS", "megatron_interleaved1f1b",
    "jaxpp_zerobubble", "sailsg_zb1p", "sailsg_zb2p", "torch_InterleavedZeroBubble",
    "sailsg_v_half", "sailsg_v_min", "sailsg_zbv", "torch_ZBVZeroBubble",
    "deepseek_dualpipev", "jaxpp_dualpipev", "torch_DualPipeV", "torch_DualPipeV_with_comms",
]  # fmt: skip
OVERLAPPED = """\
0F0,0F1,2F0,(0F2;2B0)OVERLAP_F_B,2F1,0F3,(2F2;0B0)OVERLAP_F_B,2B1,2F3,0B1,2B2,2B3,0B2,0B3
1F0,3F0,3B0,1F1,(1F2;1B0)OVERLAP_F_B,3F1,3B1,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
"""
V = "0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"


def _check_exact(strategy: object) -> None:
    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW)  # type: ignore[arg-type]
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=3) as run:
            errors = compare(run, batches_of("deep"), reference_of("deep", job))
        assert errors.exact, errors


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_tables_train_exactly(source: str) -> None:
    name = source.removesuffix("_with_comms")
    path = str(TABLES / f"{name}_2rank_4mb{source[len(name) :]}.csv")
    _check_exact(parallel(pp=2, dp=2, schedule=path, microbatches=PIECES // 2))


@pytest.mark.parametrize("ep", [1, 2])
def test_a_published_table_of_two_directions_trains_exactly(ep: int) -> None:
    path = str(TABLES / "deepseek_dualpipe_4rank_8mb.csv")
    _check_exact(parallel(pp=4, dp=ep, ep=ep, schedule=path, microbatches=8))


def test_overlapped_pairs_of_full_backwards_train_exactly() -> None:
    table = parse_csv(OVERLAPPED, name="mine")
    _check_exact(parallel(pp=2, dp=2, ep=2, schedule=table, microbatches=4))


def test_a_v_of_full_backwards_trains_exactly() -> None:
    strategy = parallel(pp=2, dp=4, schedule=parse_csv(V, name="mine"), microbatches=2)
    _check_exact(strategy)


def zigzag(*, num_ranks: int, num_microbatches: int) -> list[str]:
    """One microbatch after the other."""
    cells = [[f"{r}F{m},{r}B{m}" for m in range(num_microbatches)] for r in range(num_ranks)]
    return [",".join(row) for row in cells]


def test_a_function_of_the_users_trains_exactly() -> None:
    _check_exact(parallel(pp=4, schedule=zigzag, microbatches=PIECES))


def test_the_history_makes_the_same_table_again() -> None:
    given = parallel(pp=2, dp=4, schedule=parse_csv(V, name="mine"), microbatches=2)
    program = program_of("deep").apply(given)
    line = str(program.history[-1])
    assert line.startswith("s.order(piper.schedules.parse_csv('0F0,0F1,3F0,")
    looped = program_of("deep").apply(parallel(pp=2, schedule="looped_bfs", microbatches=8))
    assert str(looped.history[-1]) == (
        "s.order(piper.schedules.schedule('looped_bfs', num_ranks=2, num_microbatches=8, "
        "stages_per_rank=2))"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_exactly_by_its_directives(name: str) -> None:
    """A table given as data is the same as its name: here on one data rank, eight microbatches."""
    table = schedule(name, num_ranks=2, num_microbatches=8)
    _check_exact(parallel(pp=2, schedule=table, microbatches=8))


def test_a_table_for_other_numbers_is_refused() -> None:
    table = schedule("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="num_microbatches is 8, but the table has 4"):
        program_of("deep").apply(parallel(pp=2, schedule=table, microbatches=8))
    path = str(TABLES / "torch_GPipe_2rank_4mb.csv")
    with pytest.raises(ScheduleError, match="num_microbatches is 8, but the table has 4"):
        program_of("deep").apply(parallel(pp=2, schedule=path, microbatches=8))
    with pytest.raises(ScheduleError, match="2 regions do not divide over the 4 stages of"):
        program_of("moe").apply(parallel(pp=2, schedule="looped_bfs", microbatches=8))
    assert read_table(path).num_stages == 2


def test_a_schedule_is_looked_at_without_a_pipeline_too() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called 'foo'"):
        parallel(dp=2, schedule="foo")
    table = schedule("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="num_ranks is 1, but the table has 2"):
        parallel(dp=2, schedule=table)


def test_the_number_of_microbatches_comes_from_the_table() -> None:
    path = str(TABLES / "torch_LoopedBFS_2rank_4mb.csv")
    program = program_of("deep").apply(parallel(pp=2, schedule=path))
    assert "s.split(where(), 'MB', 4)" in [str(record) for record in program.history]


def _ordered(groups: object, **options: object) -> None:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(pp=2)
        for region in range(4):
            s.place(where(PP=region), mesh.at(pp=region % 2))
        s.split(where(), "MB", 2)
        s.order(groups, **options)  # type: ignore[arg-type]

    program_of("deep").apply(strategy)


LOOPED = schedule("looped_bfs", num_ranks=2, num_microbatches=2)
SIMPLE = schedule("1f1b", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ("1f1b", {}, "'1f1b' is no list of groups"),
        ([["PP"], ["MB"]], {}, "a group is made of something else than where"),
        (SIMPLE, {"stages": [0, 1]}, "does not have every region of PP once"),
        (SIMPLE, {"stages": [[0, 1], [2]]}, "does not have every region of PP once"),
        (SIMPLE, {"stages": [[0, 1], [2, 2]]}, "does not have every region of PP once"),
        (LOOPED, {"microbatch": "X"}, r's.split\(where\(\), "X", 2\) before the order'),
    ],
)
def test_what_is_no_order(groups: object, options: dict, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        _ordered(groups, **options)


def test_an_incomplete_table_is_refused_as_an_order() -> None:
    incomplete = Table("inc", 4, 2, (LOOPED.rows[0], LOOPED.rows[1][:-1]))
    with pytest.raises(ScheduleError, match=r"table inc .*incomplete: rank 1 never runs"):
        _ordered(incomplete)


def test_the_history_keeps_every_argument() -> None:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(q=2)
        for region in range(4):
            s.place(where(PP=region), mesh.at(q=region % 2))
        s.split(where(), "M", 2)
        s.order(LOOPED, axis="q", microbatch="M", stages=[[0], [1], [2], [3]])

    line = str(program_of("deep").apply(strategy).history[-1])
    assert line.endswith("), axis='q', microbatch='M', stages=[[0], [1], [2], [3]])")
