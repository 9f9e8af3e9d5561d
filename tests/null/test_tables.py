"""Tables of a user's own: read, and refused with the place marked where they cannot run."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from piper.errors import ScheduleError
from piper.schedules import (
    SCHEDULES,
    Action,
    Cell,
    Table,
    as_code,
    check,
    from_rows,
    parse_csv,
    parse_json,
    read_table,
    replay,
    schedule,
)
from piper.schedules.read import parse_action


def _refused(text: str) -> str:
    with pytest.raises(ScheduleError) as raised:
        parse_csv(text, name="mine", file="mine.csv")
    return str(raised.value)


def test_a_missing_backward() -> None:
    assert _refused("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n") == (
        "table mine (mine.csv:2): incomplete: rank 1 never runs 1B1 (requirement 2)\n"
        "    rank 0 | 0F0 0F1 0B0 0B1\n"
        "    rank 1 | 1F0 1B0 1F1\n"
        "                         ^ 1B1 is missing\n"
        "  legal: each stage: F and B (or I and W) once for microbatches 0 to 1"
    )


def test_a_missing_half() -> None:
    assert "incomplete: rank 0 never runs 0W0 (requirement 2)" in _refused("0F0,0I0")


def test_a_missing_forward_on_the_first_rank() -> None:
    text = _refused("0F1,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1")
    assert "(mine.csv:1): incomplete: rank 0 never runs 0F0, and 1 more" in text


def test_a_stage_that_nobody_runs() -> None:
    assert "incomplete: no rank runs stage 1 (requirement 1)" in _refused("0F0,0B0\n2F0,2B0")


def test_a_rank_that_runs_nothing() -> None:
    rows = [["0F0", "0B0"], [], ["1F0", "1B0"]]
    with pytest.raises(ScheduleError, match="incomplete: rank 1 runs nothing"):
        from_rows(rows)


def test_a_direction_without_a_stage() -> None:
    text = _refused("d0:0F0,d0:0B0,d1:0F0,d1:0B0\nd0:1F0,d0:1B0")
    assert "incomplete: no rank runs stage 1 in direction 1" in text


@pytest.mark.parametrize("again", ["0F0", "0B0", "0I0", "0W0"])
def test_an_action_twice(again: str) -> None:
    text = _refused(f"0F0,0B0,{again}\n1F0,1B0")
    assert f"duplicated: {again} repeats cell {0 if again == '0F0' else 1} of rank 0" in text
    assert "                     ^^^ see cell" in text


def test_a_stage_on_two_ranks() -> None:
    text = _refused("0F0,0B0,0F1\n1F0,1B0,1F1,1B1,0B1")
    assert "(mine.csv:2): impossible: 0B1 is on rank 1, but rank 0 runs its stage" in text
    text = _refused("1F1,0F0,0B0,0F1,0B1\n1F0,1B0,1B1")  # the odd one out is marked
    assert "(mine.csv:1): impossible: 1F1 is on rank 0, but rank 1 runs its stage" in text


def test_a_backward_before_its_forward() -> None:
    text = _refused("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0")
    assert "(mine.csv:2): impossible: 1B1 needs 1F1, but runs before it (requirement 3)" in text
    assert "\n                 ^^^ needs 1F1\n" in text


def test_a_weight_half_before_its_input_half() -> None:
    assert "impossible: 0W0 needs 0I0, but runs before it" in _refused("0F0,0W0,0I0")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("(0F0;0B0)OVERLAP_F_B", "0B0 needs 0F0, but runs side by side with it"),
        ("(0F0;0F1)OVERLAP_F_B,0B0", r"is not one forward and one backward"),
        ("(0B0;0F0)FUSED", "0B0 needs 0F0, but runs"),
    ],
)
def test_a_group_that_cannot_run_together(cell: str, message: str) -> None:
    rest = ",0B1" if "0F1" in cell else ""
    assert message in _refused(cell + rest)


def test_a_deadlock() -> None:
    assert _refused("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n") == (
        "table mine (mine.csv:1): deadlock: ranks wait for each other, rank 0 -> rank 1 -> rank 0 "
        "(requirement 4)\n"
        "    rank 0 | 0F0 0B0 0F1 0B1\n"
        "                 ^^^ waits for 1B0\n"
        "    rank 1 | 1F1 1F0 1B0 1B1\n"
        "             ^^^ waits for 0F1\n"
        "  legal: an order in which the awaited actions come first"
    )


def test_a_deadlock_shows_the_circle_and_not_who_waits_behind_it() -> None:
    text = _refused("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F1,2F0,2B0,2B1")
    assert "rank 1 -> rank 2 -> rank 1" in text
    assert text.count("waits for") == 2


def test_long_and_tall_tables_are_shown_around_the_place() -> None:
    table = schedule("1f1b", num_ranks=64, num_microbatches=100)
    lines = table.as_csv().splitlines()
    lines[40] = lines[40].replace("40F50,", "")
    text = _refused("\n".join(lines))
    assert "(mine.csv:41): incomplete: rank 40 never runs 40F50" in text
    assert "and 47 more ranks" in text
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table is empty"),
        ("0F0,0X0", "'0X0' (rank 0, cell 1) is not an action"),
        ("0F0,0B0\n\n1F0,1B", "(mine.csv:3): '1B' (rank 1, cell 1) is not an action"),
        ("0F0,0F" + "9" * 5000, "is not an action"),
        ("\u0660F\u0660,0B0", "is not an action"),
        ("0B0,1B0", "incomplete: no stage runs a forward"),
        ("d0:0F0,d0:0B0\nd1:0F0,0B0", "(mine.csv:2): the directions are d0:, d1:, none; see 0B0"),
        ("d0:0F0,0B0", "the directions are d0:, none"),
        ("d0:0F0,d0:0B0,d2:0F0,d2:0B0", "the directions are d0:, d2:"),
        ("(0F0;0B0)TOGETHER", "is not an action"),
    ],
)
def test_what_is_not_a_table(text: str, message: str) -> None:
    assert message in _refused(text)


def test_idle_cells_communication_and_comments_are_left_out() -> None:
    text = "# mine\n0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n,1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert parse_csv(text, name="mine").as_csv() == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_json_and_code_give_the_same_table(name: str, tmp_path: Path) -> None:
    table = schedule(name, num_ranks=4, num_microbatches=8)
    csv, form = tmp_path / "mine.csv", tmp_path / "mine.json"
    csv.write_text(table.as_csv())
    assert read_table(csv).rows == table.rows
    assert read_table(csv).num_microbatches == 8
    rows = [[str(cell) for cell in row] for row in table.rows]
    form.write_text(json.dumps({"name": name, "rows": rows}))
    assert read_table(form) == table
    import piper

    assert eval(as_code(table), {"piper": piper}) == table


def test_code_of_a_table_that_is_not_the_named_one() -> None:
    table = parse_csv("0F0,0B0\n1F0,1B0\n", name="gpipe")
    assert as_code(table) == "piper.schedules.schedule('gpipe', num_ranks=2, num_microbatches=1)"
    other = schedule("auto", num_ranks=2, num_microbatches=3, max_in_flight=1)
    assert as_code(other).startswith("piper.schedules.parse_csv('0F0,")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a table in JSON"),
        ("{}", "missing required field `rows`"),
        ('{"rows": ["0F0"]}', "Expected `array`, got `str` - at `$.rows[0]`"),
        ('{"rows": [[3]]}', "at `$.rows[0][0]`"),
        ('{"version": 9, "rows": [["0F0", "0B0"]]}', "at `$.version`"),
        ('{"name": 3, "rows": [["0F0", "0B0"]]}', "at `$.name`"),
        ('{"num_stages": 2, "rows": [["0F0", "0B0"]]}', "num_stages is 2, but the rows have 1"),
        ('{"placement": [[1]], "rows": [["0F0", "0B0"]]}', "placement is [[1]], but the rows"),
        ('{"name": "a\\u0001", "rows": [["0F0", "0B0"]]}', "is no name"),
        ("[" * 100_000, "not a table in JSON"),
        ('[["0F0"]]', "incomplete: rank 0 never runs 0B0"),
    ],
)
def test_json_that_is_not_a_table(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        parse_json(text, name="mine", file="mine.json")
    assert message in str(raised.value) and "mine.json:1" in str(raised.value)


def test_json_errors_have_the_line_of_the_row() -> None:
    text = '{"name": "mine",\n "rows": [\n  ["0F0",\n   "0B0"],\n  ["1F0", "1X0"]\n ]}'
    with pytest.raises(ScheduleError, match=r"mine.json:5\): '1X0' \(rank 1, cell 1\)"):
        parse_json(text, name="mine", file="mine.json")
    # Where another "rows" comes first, the line is not known.
    other = '{"costs": {"rows": [[1]]},\n "rows": [["0F0"],\n ["1F0", "1B0"]]}'
    with pytest.raises(ScheduleError, match=r"mine.json:1\): incomplete: rank 0 never runs 0B0"):
        parse_json(other, name="mine", file="mine.json")
    with pytest.raises(ScheduleError, match=r"mine.json:2\): not a table in JSON"):
        parse_json('{"name":\n x', name="mine", file="mine.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"there is no file .*none.csv"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "mine.txt").write_text("0F0,0B0")
    with pytest.raises(ScheduleError, match=r"mine.txt is no table"):
        read_table(tmp_path / "mine.txt")
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="it is not text"):
        read_table(tmp_path / "mine.csv")


def zigzag(*, num_ranks: int, num_microbatches: int) -> Iterator[Iterator[str]]:
    """One microbatch after the other: a generator as a user would write it."""
    for rank in range(num_ranks):
        yield (f"{rank}{kind}{m}" for m in range(num_microbatches) for kind in "FB")


def broken(*, num_ranks: int, num_microbatches: int) -> list[str]:
    return ["0F0,0B0"] * num_ranks


def test_a_function_is_a_schedule() -> None:
    table = schedule(zigzag, num_ranks=3, num_microbatches=2)
    assert table.name == "zigzag"
    assert table.as_csv().splitlines()[2] == "2F0,2B0,2F1,2B1"
    assert replay(table).peak_in_flight == [1, 1, 1]
    with pytest.raises(ScheduleError, match=r"table broken \(.*test_tables.py:\d+\): impossible"):
        schedule(broken, num_ranks=2, num_microbatches=1)


def test_rows_of_actions_and_cells() -> None:
    rows = [[Action(0, "F", 0), Cell((Action(0, "F", 1), Action(0, "B", 0)), "OVERLAP_F_B"), "0B1"]]
    assert from_rows(rows).as_csv() == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    with pytest.raises(ScheduleError, match="3 \\(rank 0, cell 1\\) is not an action"):
        from_rows([["0F0", 3]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "cell",
    [
        Cell((Action(-1, "F", 0),)),
        Cell((Action(0, "F", -1),)),
        Cell((Action(0, "X", 0),)),  # type: ignore[arg-type]
        Cell((Action(0.0, "F", 0),)),  # type: ignore[arg-type]
        Cell((Action(0, "F", 0), Action(0, "B", 0))),
        Cell((Action(0, "F", 0),), "FUSED"),
        Cell((Action(0, "F", 0), Action(0, "B", 0)), "Q"),  # type: ignore[arg-type]
        Cell(()),
    ],
    ids=range(8),
)
def test_cells_that_are_none(cell: Cell) -> None:
    with pytest.raises(ScheduleError, match="rank 0, cell 0 is no action"):
        from_rows([[cell]])
    with pytest.raises(ScheduleError, match="rank 0, cell 0 is no action"):
        check(Table("hand", 1, 1, ((cell,),)))


def test_directions_of_a_table_made_by_hand() -> None:
    rows = from_rows(["d0:0F0,d0:0B0,d1:0F0,d1:0B0"]).rows
    for wrong in (0, 3):
        with pytest.raises(ScheduleError, match=f"{wrong} directions"):
            check(Table("hand", 1, 2, rows, wrong))
    with pytest.raises(ScheduleError, match="impossible: d0:0F0 in a table of 1 directions"):
        check(Table("hand", 1, 2, rows, 1))
    with pytest.raises(ScheduleError, match="the table is empty"):
        check(Table("hand", 1, 1, ()))


def nothing(*, num_ranks: int, num_microbatches: int) -> None:
    pass


def positional(p: int, m: int) -> None:
    pass


def endless(*, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    while True:
        yield "0F0,0B0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (nothing, r"schedule nothing \(.*test_tables.py:\d+\): it gives None"),
        (positional, r"schedule positional \(.*test_tables.py:\d+\): it is called with num_ranks"),
        (endless, "0F0 is on rank 1, but rank 0 runs its stage"),
        (None, "it is no schedule"),
        ([["0F0", "0B0"]], "it is no schedule"),
        ("mine.txt", "no schedule is called 'mine.txt'"),
    ],
)
def test_what_is_not_a_schedule(name: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule(name, num_ranks=2, num_microbatches=1)  # type: ignore[arg-type]


def test_a_table_and_a_path_are_schedules(tmp_path: Path) -> None:
    table = from_rows(["0F0,0B0", "1F0,1B0"], name="mine.csv")
    assert schedule(table, num_ranks=2, num_microbatches=1) is table
    (tmp_path / "mine.csv").write_text(table.as_csv())
    assert schedule(tmp_path / "mine.csv", num_ranks=2, num_microbatches=1) == table
    with pytest.raises(ScheduleError, match="it takes no costs"):
        schedule(table, num_ranks=2, num_microbatches=1, costs=3)
    with pytest.raises(ScheduleError, match="unexpected keyword argument 'costs'"):
        schedule("1f1b", num_ranks=2, num_microbatches=1, costs=3)


@pytest.mark.parametrize("number", [2.0, "2", True, 0, -1])
def test_sizes_that_are_no_numbers(number: object) -> None:
    with pytest.raises(ScheduleError, match=r"a whole number \(int\) of at least 1"):
        schedule("1f1b", num_ranks=number, num_microbatches=2)  # type: ignore[arg-type]


def test_a_table_prints_as_a_grid() -> None:
    table = from_rows(["0F0,0B0", "1F0,1B0"], name="mine")
    assert str(table) == "mine: 2 stages, 1 microbatches\nrank 0 | 0F0 0B0\nrank 1 | 1F0 1B0"


def test_a_table_made_by_hand_is_checked_too() -> None:
    rows = ((Cell((Action(0, "F", 0),)),),)
    with pytest.raises(ScheduleError, match=r"incomplete: rank 0 never runs 0B0"):
        check(Table("hand", 1, 1, rows))
    both = from_rows(["d0:0F0,d1:0F0,d0:0B0,d1:0B0"])
    with pytest.raises(ScheduleError, match="3 microbatches in 2 directions"):
        check(Table("hand", 1, 3, both.rows, 2))
    two = from_rows(["0F0,1F0,1B0,0B0"])
    with pytest.raises(ScheduleError, match="impossible: 1F0, but there are 1 stages"):
        check(Table("hand", 1, 1, two.rows))


def test_actions_print_and_parse() -> None:
    for text in ("2F0", "0B11", "3I1", "1W2", "d1:0F3"):
        assert str(parse_action(text)) == text
    with pytest.raises(ScheduleError, match="'F0' is not an action"):
        parse_action("F0")


def test_a_table_with_more_microbatches_than_cells_is_not_made_again() -> None:
    """A damaged file may say so: making that many would take all memory."""
    table = schedule("1f1b", num_ranks=2, num_microbatches=4)
    damaged = msgspec.structs.replace(table, num_microbatches=10**12)
    assert as_code(damaged).startswith("piper.schedules.parse_csv(")
    assert as_code(table).startswith("piper.schedules.schedule('1f1b', ")
