"""How long `make demo` takes from its start to the line of its first step, beside another tree's.

    python benchmarks/first_step.py ../other/tree

Both trees' demos run in turn, so that they meet the same machine. Prints the medians of wall seconds and
of CPU seconds over all processes.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
FIRST = re.compile(r"step +1/\d+ +loss (\S+)")
TICKS = os.sysconf("SC_CLK_TCK")


def start(tree: Path) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds and the loss of a demo's first step."""
    command = [sys.executable, "examples/demo.py"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    begin = time.perf_counter()
    demo = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    with demo:
        assert demo.stdout is not None
        try:
            for line in demo.stdout:
                if found := FIRST.match(line):
                    return time.perf_counter() - begin, cpu_seconds(demo.pid), found[1]
        finally:
            demo.kill()  # its workers end with it
    raise SystemExit(f"the demo of {tree} ended with code {demo.returncode} before its first step")


def cpu_seconds(root: int) -> float:
    """Of a process and all that came from it, whether they still run or were waited for."""
    fields = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:  # it has just ended
            continue
        fields[int(file.parent.name)] = text.rpartition(")")[2].split()
    family = {root}
    while more := {pid for pid, row in fields.items() if int(row[1]) in family} - family:
        family |= more
    return sum(int(ticks) for pid in family for ticks in fields[pid][11:15]) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="the root of another tree")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = {"here": HERE} | ({"other": options.other.resolve()} if options.other else {})
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            found[name].append(start(tree))
    if len(losses := {loss for rows in found.values() for *_, loss in rows}) != 1:
        raise SystemExit(f"the first losses differ: {sorted(losses)}")
    medians = {}
    for name, rows in found.items():
        wall, cpu = medians[name] = [statistics.median(row[i] for row in rows) for i in (0, 1)]
        print(f"{name:6} {wall:6.2f} s wall {cpu:6.2f} s CPU  (median of {len(rows)})")
    if "other" in medians:
        wall, cpu = (mine / theirs for mine, theirs in zip(*medians.values(), strict=True))
        print(f"{'ratio':6} {wall:6.2f}   wall {cpu:6.2f}   CPU")


if __name__ == "__main__":
    main()
