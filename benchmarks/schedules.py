"""Time to generate, check and replay every schedule at 64 ranks x 512 microbatches.

Run: python benchmarks/schedules.py [--ranks 64] [--microbatches 512]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from piper.schedules import SCHEDULES, check, parse_csv, replay, schedule


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


if __name__ == "__main__":
    main()
