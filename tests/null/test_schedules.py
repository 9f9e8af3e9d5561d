"""Schedules: complete tables, equal to what their authors publish."""

from pathlib import Path

import pytest

from piper.errors import ScheduleError
from piper.schedules import SCHEDULES, schedule
from piper.schedules.table import Action, parse_action

HERE = Path(__file__).parent / "tables"
PUBLISHED = {
    "gpipe": ["torch_GPipe", "jaxpp_gpipe"],
    "1f1b": ["deepspeed_1f1b", "sailsg_1f1b"],
    "interleaved_1f1b": ["megatron_interleaved1f1b", "torch_Interleaved1F1B"],
}


def _read(path: Path) -> list[list[str]]:
    """The actions of a published table, without idle cells and gradient reductions."""
    rows = []
    for line in path.read_text().splitlines():
        cells = [cell.strip().removesuffix("FUSED").strip("()") for cell in line.split(",")]
        actions = [word for cell in cells for word in cell.split(";") if word]
        rows.append([word for word in actions if "REDUCE_GRAD" not in word])
    return rows


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_the_published_tables(name: str, ranks: int, microbatches: int) -> None:
    table = schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    mine = [[str(action) for cell in row for action in cell] for row in table.rows]
    for source in PUBLISHED[name]:
        assert mine == _read(HERE / f"{source}_{ranks}rank_{microbatches}mb.csv"), source


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
def test_every_action_once_or_a_clear_error(name: str, ranks: int, microbatches: int) -> None:
    try:
        table = schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    except ScheduleError as error:
        assert name == "interleaved_1f1b" and microbatches % ranks
        assert f"a multiple of {ranks}" in str(error)
        return
    found = sorted(action for row in table.rows for cell in row for action in cell)
    wanted = [
        Action(stage, kind, m)  # type: ignore[arg-type]
        for stage in range(table.num_stages)
        for kind in ("B", "F")
        for m in range(microbatches)
    ]
    assert found == sorted(wanted)


def test_actions_print_and_parse() -> None:
    for text in ("2F0", "0B11", "3I1", "1W2"):
        assert str(parse_action(text)) == text
    with pytest.raises(ScheduleError, match="'F0' is not an action"):
        parse_action("F0")
