"""The benchmarks that run beside torch: small, here only for equal losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif("PIPER_LONG" not in os.environ, reason="a minute: PIPER_LONG=1 runs it"),
]
HOME = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(HOME / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_host_cost_compares_losses_with_one_process() -> None:
    said = run("host_cost.py", "--quick", "--rows", "zbv,zero3")
    for row, other in [("zbv", "zbv"), ("zero3", "fsdp2")]:
        assert f"| {row} |" in said and f"| {other} |" in said
    assert "equal those of one process" in said


def test_shared_gpu_runs_on_processes(tmp_path: Path) -> None:
    report, traces = tmp_path / "found.json", tmp_path / "traces"
    said = run(
        *("shared_gpu.py", "--device", "cpu", "--small", "--schedules", "dualpipev"),
        *("--steps", "1", "--warmup", "1", "--json", str(report), "--trace", str(traces)),
    )
    assert "first losses of all equal that of one process" in said
    (found,) = json.loads(report.read_text())["schedules"]
    assert found["schedule"] == "dualpipev"
    assert all(len(found[side]["ms"]) == 1 for side in ("piper", "torch"))
    names = {str(path.relative_to(traces)) for path in traces.glob("*/*")}
    assert names == {
        f"{side}_dualpipev/rank{rank}.json.gz" for side in ("piper", "torch") for rank in range(4)
    }


@pytest.mark.parametrize("rows", ["DP4 ZeRO-3", "PP2 x DP2 ZeRO-2", "experts PP2 x EP2 dualpipev"])
def test_peers_have_equal_losses_and_a_run_goes_on(rows: str, tmp_path: Path) -> None:
    report = tmp_path / "peers.json"
    arguments = (
        *("--device", "cpu", "--rows", rows, "--regimes", "masters", "--json", str(report)),
        *("--steps", "1", "--rounds", "1", "--warmup", "1"),
    )
    said = run("peers.py", *arguments)
    (found,) = json.loads(report.read_text())["rows"].values()
    assert found["row"] == rows and len(found["sides"]) >= 2
    assert all(len(side["ms"]) == 1 for side in found["sides"].values())
    assert len(found["losses"]) == 3
    mine = found["sides"]["piper"]
    assert 0 < mine["bare_ms"] <= mine["communication_ms"]
    before = report.read_text()
    again = run("peers.py", *arguments)  # nothing is left to do
    assert json.loads(report.read_text())["rows"] == json.loads(before)["rows"]
    assert again.splitlines()[-1] == said.splitlines()[-1]


def test_the_largest_batch_is_found_and_run(tmp_path: Path) -> None:
    report = tmp_path / "largest.json"
    said = run(
        *("largest_batch.py", "--device", "cpu", "--limit", "1MiB", "--most", "8"),
        *("--steps", "1", "--json", str(report)),
    )
    rows = json.loads(report.read_text())["rows"]
    mine = [row for name, row in rows.items() if name.startswith("Piper")]
    assert len(mine) == 6 and len(rows) == 10
    assert all(0 < row["rows"] < 8 and row["planned"] <= 1 << 20 and row["ms"] > 0 for row in mine)
    table = said.partition("| side |")[2]
    assert table.count("not measured: no peaks on a CPU") == 4
