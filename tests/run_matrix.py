"""Every case of the parity matrix, plain and adversary, in; docs/parity_matrix.md out."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from piper.api.job import Job
from piper.training.verify import Errors
from tests.matrix import ALL, AXES, CELLS, LONG, Cell
from tests.zoo import PIECES, STEPS

PAGE = Path(__file__).parents[1] / "docs" / "parity_matrix.md"
WORKERS = os.cpu_count() or 2
COLUMNS = ("loss", "gradient", "parameter")
TENSORS = "## Tensor, sequence and context parallelism"  # the part of tests/run_tensor_matrix.py
C = TypeVar("C", bound="Case")


class Case(Protocol):
    """A case of a matrix."""

    def job(self) -> Job: ...

    def errors(self, job: Job, *, adversary: bool) -> Errors: ...


@dataclass(frozen=True)
class Result(Generic[C]):
    """What the two runs of a case gave; `failure` is empty if both trained like one device."""

    cell: C
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    failure: str = ""


def run_cell(cell: C) -> Result[C]:
    try:
        job = cell.job()
        both = [cell.errors(job, adversary=adversary) for adversary in (False, True)]
    except Exception as error:  # one case must not end the others
        return Result(cell, failure=f"{type(error).__name__}: {error}")
    wrong = [_describe(errors) for errors in both if not errors.exact]
    worst = (max(getattr(errors, column) for errors in both) for column in COLUMNS)
    return Result(cell, *worst, failure="; ".join(wrong))


def _describe(errors: Errors) -> str:
    replicas = f", replicas of {errors.differing_replicas} differ" * bool(errors.differing_replicas)
    numbers = (f"{c} {getattr(errors, c):.1e} ({errors.worst.get(c, 'exact')})" for c in COLUMNS)
    return ", ".join(numbers) + replicas


def run_program(cells: list[Cell]) -> list[Result[Cell]]:
    """All cases of one model in one process: its captures, bodies and reference are made once."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".torch.jit", DeprecationWarning)
    found = []
    for key, group in groupby(cells, key=lambda c: (c.model, c.experts, c.zero, c.pp)):
        begin = time.perf_counter()
        results = [run_cell(cell) for cell in group]
        found += results
        model, experts, zero, pp = key
        print(
            f"{model:9} ZeRO-{zero} pp{pp} experts {experts:7} {len(results):3} cases  "
            f"{worst(results)}  {sum(bool(r.failure) for r in results)} failed  "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    return found


def worst(results: Iterable[Result[Any]]) -> str:
    results = list(results)
    return " ".join(f"{max(getattr(r, c) for r in results):.1e}" for c in COLUMNS)


def table(title: str, results: list[Result[C]], value: Callable[[C], str]) -> list[str]:
    """With one row per value of an axis."""
    rows: dict[str, list[Result[C]]] = defaultdict(list)
    for result in results:
        rows[value(result.cell)].append(result)
    lines = [f"| {title} | cases | failed | loss | gradient | parameter |", "|---" * 6 + "|"]
    for name, found in rows.items():
        failed = sum(bool(r.failure) for r in found)
        lines.append(f"| {name} | {len(found)} | {failed} | {worst(found).replace(' ', ' | ')} |")
    return [*lines, ""]


def page(results: list[Result[Cell]], seconds: float) -> str:
    """The page with all tables."""
    failed = [result for result in results if result.failure]
    reasons = Counter(cell.excluded for cell in ALL if cell.excluded)
    axes = " x ".join(f"{len(values)} ({axis})" for axis, values in AXES.items())
    lines = [
        "# Parity matrix", "",
        "Written by `make matrix` (tests/run_matrix.py; the cases: tests/matrix.py, the models: "
        "tests/zoo.py).", "",
        f"Every case trains a four-stage model for {STEPS} AdamW steps in float64 with all ranks in "
        "one process,", "once in dispatch order and once under the adversary (any order that streams "
        "and waits allow, freed memory",
        f"poisoned), on {PIECES} global microbatches (16 where a schedule needs more), and is compared "
        "with the user's", "module on one device. Bounds: loss and gradients of every step 1e-10, final "
        "parameters 1e-8, replicas", "bit-equal. The numbers below are the largest relative errors.",
        "",
        f"- torch {torch.__version__}; {seconds / 60:.0f} minutes on {WORKERS} processes",
        f"- {len(CELLS)} of {len(ALL)} combinations of {axes} with two pipeline ranks,",
        f"  and {len(LONG)} more with four",
        *(f"- {count} combinations do not exist: {why}" for why, count in reasons.items()),
        f"- **{len(results)} cases, {len(failed)} failed**",
        "",
    ]  # fmt: skip
    sections: list[tuple[str, Callable[[Cell], str]]] = [
        ("ZeRO", lambda c: str(c.zero)),
        ("schedule", lambda c: c.schedule),
        ("experts", lambda c: c.experts),
        ("model", lambda c: c.model),
        ("ranks", _ranks),
    ]
    for title, value in sections:
        lines += table(title, results, value)
    if failed:
        lines += ["## Failures", "", *(f"- `{r.cell.name}`: {r.failure}" for r in failed), ""]
    return "\n".join(lines)


def _ranks(cell: Cell) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in cell.degrees.items())


def main() -> int:
    begin = time.perf_counter()
    wanted = [cell for cell in (*CELLS, *LONG) if all(w in cell.name for w in sys.argv[1:])]
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in sorted(wanted, key=lambda c: (c.model, c.experts, c.zero, c.pp)):
        # On many cores a model is traced several times, so that all have work.
        groups[cell.program, cell.zero if WORKERS > 4 else 0].append(cell)
    largest_first = sorted(groups.values(), key=len, reverse=True)
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        found = [
            result for part in pool.imap_unordered(run_program, largest_first) for result in part
        ]
    place = {cell: number for number, cell in enumerate(wanted)}
    results = sorted(found, key=lambda result: place[result.cell])
    text = page(results, time.perf_counter() - begin)
    print(text)
    if len(wanted) == len(CELLS) + len(LONG):
        _, heading, tensors = PAGE.read_text().partition(TENSORS)
        PAGE.write_text(f"{text}\n{heading}{tensors}" if heading else text)
    return any(result.failure for result in results)


if __name__ == "__main__":
    sys.exit(main())
