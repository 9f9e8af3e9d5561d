"""Time to generate, check and replay every schedule; bubble rates beside the zero-bubble paper's.

Run: python benchmarks/schedules.py [--ranks 64] [--microbatches 512]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piper.schedules import SCHEDULES, Costs, auto, check, parse_csv, replay, schedule

PAPER = Path(__file__).parents[1] / "tests" / "null" / "conformance" / "zero_bubble_paper.json"
# 32h / (34h + 5as): what a layer keeps from BI to BW, by the paper's count of bytes.
KEPT = {"1.5B": 32 / (34 + 5 * 24 * 1024 / 2304), "14.6B": 32 / (34 + 5 * 40 * 1024 / 5120)}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    arguments = parser.parse_args()
    sizes = {"num_ranks": arguments.ranks, "num_microbatches": arguments.microbatches}
    print(f"{arguments.ranks} ranks x {arguments.microbatches} microbatches, seconds")
    print(
        f"{'schedule':<18}{'actions':>9}{'generate':>10}{'check':>8}{'replay':>8}{'read csv':>10}"
    )
    for name in SCHEDULES:
        table, generating = timed(lambda name=name: schedule(name, **sizes))
        _, checking = timed(lambda table=table: check(table))
        _, replaying = timed(lambda table=table: replay(table))
        text = table.as_csv()
        _, reading = timed(lambda text=text, name=name: parse_csv(text, name=name))
        print(
            f"{name:<18}{sum(1 for _ in table.actions()):>9}{generating:>10.2f}{checking:>8.2f}"
            f"{replaying:>8.2f}{reading:>10.2f}"
        )
    print("\nbubble rates with the times of arXiv 2401.10241, Table 9, beside its Table 5")
    print("model   PP    M   1F1B  paper  auto 1PP  paper  auto 2PP  paper")
    for row in json.loads(PAPER.read_text())["rows"]:
        print(beside_paper(row))


def beside_paper(row: dict[str, Any]) -> str:
    costs = Costs(F=row["TF"], BI=row["TB"], BW=row["TW"], comm=row["Tcomm"])
    sizes = {"num_ranks": row["p"], "num_microbatches": row["m"]}
    rates = [replay(schedule("1f1b", **sizes), costs).bubble_of_span]
    for limit in (1, 2):
        table = auto(**sizes, costs=costs, max_in_flight=limit * row["p"], kept=KEPT[row["model"]])
        rates.append(replay(table, costs).bubble_of_span)
    paper = [row["bubble"][name] for name in ("1F1B", "ZB-1p", "ZB-2p")]
    return f"{row['model']:<6}{row['p']:>4}{row['m']:>5}" + "".join(
        f"{mine:>{width}.4f}{theirs:>7.4f}"
        for mine, theirs, width in zip(rates, paper, (7, 10, 10), strict=True)
    )


if __name__ == "__main__":
    main()
