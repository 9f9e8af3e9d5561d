"""`piper schedule`: what it prints, what it refuses, how soon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from piper.cli.main import main
from piper.schedules import SCHEDULES, read_table, schedule

Capture = pytest.CaptureFixture[str]
SMALL = ["--ranks", "2", "--microbatches", "3"]


def _run(capsys: Capture, *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def _refused(capsys: Capture, *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


def test_the_text_form(capsys: Capture) -> None:
    assert _run(capsys, "1f1b", *SMALL) == (
        "time   0                   5                   10\n"
        "rank 0 0F0 0F1         0B0---- 0F2 0B1----     0B2----\n"
        "rank 1     1F0 1B0---- 1F1 1B1---- 1F2 1B2----\n"
        "\n"
        "1f1b: 2 ranks, 2 stages, 3 microbatches; costs F=1,BI=1,BW=1,comm=0\n"
        "makespan  12, busy 9 on every rank\n"
        "bubble    25.00% of the makespan (mean idle time of a rank)\n"
        "          25.00% of the longest span of a rank, 12 (bubble rate of the zero-bubble paper)\n"
        "holds     at most 2 1 (microbatches, once per stage)\n"
        "formula   bubble (PP-1)(F+B): 3; by replay 3\n"
        "          holds min(M, PP-r): 2 1\n"
    )


def test_the_formula_stands_beside_the_replay_at_other_costs(capsys: Capture) -> None:
    printed = _run(
        capsys, "dualpipev", "--ranks", "4", "--microbatches", "16",
        "--costs", "F=1,BI=1.2,BW=0.8,F&B=2.5,comm=0.1",
    )  # fmt: skip
    assert "F&B=2.5" in printed
    # (4 - 1) (2.5 + 2.0 - 3 * 0.8)
    found = re.search(r"bubble \(PP-1\)\(F&B\+B-3BW\): 6.3; by replay (\S+) \(exact at", printed)
    assert found and float(found[1]) > 6.3


def test_colours_are_one_for_each_kind(capsys: Capture) -> None:
    plain = _run(capsys, "dualpipev", "--ranks", "2", "--color", "never")
    assert "\x1b" not in plain
    colored = _run(capsys, "dualpipev", "--ranks", "2", "--color", "always")
    for terminal, label in (
        (111, "0F0"),
        (80, "3I0"),
        (114, "3W0"),
        (215, "2B0"),
        (141, "0F3&3B1"),
    ):
        assert f"\x1b[38;5;16;48;5;{terminal}m{label}" in colored


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_in_every_form(name: str, capsys: Capture, tmp_path: Path) -> None:
    table = schedule(name, num_ranks=4, num_microbatches=8)
    assert f"{name}: 4 ranks" in _run(capsys, name)
    csv = tmp_path / "mine.csv"
    csv.write_text(_run(capsys, name, "--format", "csv"))
    assert read_table(csv).rows == table.rows
    form = tmp_path / "mine.json"
    form.write_text(_run(capsys, name, "--format", "json"))
    assert read_table(form) == table
    facts = json.loads(form.read_text())
    assert facts["replay"]["makespan"] > 0 and len(facts["placement"][0]) == table.num_stages
    drawing = ElementTree.fromstring(_run(capsys, name, "--format", "svg"))
    bars = [group for group in drawing if group.tag.endswith("}g")]
    assert len(bars) == sum(len(row) for row in table.rows)
    again = _run(capsys, str(csv))
    assert again.splitlines()[0:5] == _run(capsys, name).splitlines()[0:5]


def test_the_list_names_every_schedule(capsys: Capture) -> None:
    printed = _run(capsys, "--list")
    assert [line.split()[0] for line in printed.splitlines() if line[:1].strip()][:-2] == list(
        SCHEDULES
    )
    assert "(PP/2-1)(F&B+B-3BW)" in printed


def test_auto_takes_costs_and_memory(capsys: Capture) -> None:
    printed = _run(
        capsys, "auto", "--ranks", "8", "--microbatches", "24", "--max-in-flight", "16",
        "--kept", "0.37", "--costs", "F=18.522,BI=18.086,BW=9.337,comm=0.601", "--format", "json",
    )  # fmt: skip
    assert round(json.loads(printed)["replay"]["bubble_of_span"], 4) == 0.0433
    assert "--kept is not for 1f1b" in _refused(capsys, "1f1b", "--kept", "0.5")
    assert "max_in_flight is 0.5" in _refused(capsys, "auto", "--max-in-flight", "0.5")
    assert "kept is 2" in _refused(capsys, "auto", "--kept", "2")


def test_a_function_in_a_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def zigzag(*, num_ranks, num_microbatches):\n"
        "    for r in range(num_ranks):\n"
        "        yield [f'{r}{k}{m}' for m in range(num_microbatches) for k in 'FB']\n"
        "def half(*, num_ranks, num_microbatches):\n"
        "    return ['0F0,0B0', '1F0']\n"
    )
    assert "zigzag: 2 ranks" in _run(capsys, f"{file}:zigzag", *SMALL)
    assert "mine.py:4): incomplete: rank 1 never runs 1B0" in _refused(
        capsys, f"{file}:half", *SMALL
    )
    missing = _refused(capsys, f"{file}:zigzig", *SMALL)
    assert "mine.py has no function 'zigzig' (did you mean 'zigzag'?)" in missing
    assert f"legal: {file}:zigzag, {file}:half" in missing
    assert f"legal: {file}:FUNCTION" in _refused(capsys, str(file))


def test_a_file_brings_its_own_numbers(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    for given in ([], ["--ranks", "2"], ["--microbatches", "2"], ["--stages-per-rank", "1"]):
        assert "mine.csv: 2 ranks" in _run(capsys, str(file), *given)
    assert "num_ranks is 4, but the table has 2" in _refused(capsys, str(file), "--pp", "4")
    assert "stages_per_rank is 7, but" in _refused(capsys, str(file), "--stages-per-rank", "7")
    assert "--kept is not for" in _refused(capsys, str(file), "--kept", "1")


def test_a_table_called_like_a_schedule_has_no_formula(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"name": "1f1b", "rows": [["0F0", "0B0", "0F1", "0B1"]]}')
    assert "formula" not in _run(capsys, str(file))
    assert json.loads(_run(capsys, str(file), "--format", "json"))["formula"]["bubble"] is None


def test_labels_that_do_not_fit_are_not_cut(capsys: Capture) -> None:
    printed = _run(capsys, "1f1b", *SMALL, "--costs", "F=0.0001:1,BI=1:1")
    assert "0F0" not in printed and "#" in printed
    assert "3 of 12 labels do not fit (#); csv, json and svg have all" in printed
    assert "0F11" in _run(capsys, "zbv", "--ranks", "8", "--microbatches", "100")


def test_costs_are_checked_in_every_form(capsys: Capture) -> None:
    for form in ("text", "csv", "json", "svg"):
        printed = _refused(capsys, "1f1b", "--format", form, "--costs", "F=1:1:1:1:1")
        assert "cost F has 5 numbers, but there are 4 stages" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which schedule?"),
        (["zvb"], "no schedule is called 'zvb' (did you mean 'zbv'?)"),
        (["none.csv"], "there is no file none.csv"),
        (["1f1b", "--ranks", "0"], "num_ranks is 0"),
        (["dualpipe", "--ranks", "3"], "legal: an even number: 4 ranks"),
        (["dualpipev", "--microbatches", "3"], "at least twice the ranks: 8 microbatches"),
        (["interleaved_zb", "--microbatches", "9"], "of 4, or next to 9: 8 or 10 microbatches"),
        (["1f1b", "--stages-per-rank", "2"], "stages_per_rank is 2, but the table has 1"),
        (["1f1b", "--stages-per-rank", "0"], "stages_per_rank is 0, but the table has 1"),
        (["1f1b", "--costs", "F=1e308"], "cost F=1e+308 is no time"),
        (["1f1b", "--costs", "F=1e-320"], "is no time"),
        (["1f1b", "--costs", "F=x"], "cost 'F=x' is not understood"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in _refused(capsys, *arguments)


def test_it_starts_in_half_a_second_without_torch() -> None:
    code = "import sys; from piper.cli.main import main\n" \
        "main(['schedule', 'dualpipev']); assert 'torch' not in sys.modules"  # fmt: skip
    times = []  # of the processor: what else runs here does not count
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        times.append(used.ru_utime + used.ru_stime)
    assert min(times) < 0.5, times


def test_a_reader_that_stops_is_no_error() -> None:
    command = f"{sys.executable} -m piper.cli.main schedule 1f1b --microbatches 2000 | head -1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("time") and found.stderr == ""
