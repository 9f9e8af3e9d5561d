"""Every case of the matrix of cut tensors, plain and adversary, in; its part of the page out."""

from __future__ import annotations

import multiprocessing
import os
import sys
import textwrap
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch

from tests.run_matrix import PAGE, TENSORS, WORKERS, Result, run_cell, table, worst
from tests.tensor_matrix import ALL, AXES, CELLS, HF, PIECES, STEPS, TensorCell
from tests.tensor_zoo import STEPS as OWN_STEPS


def run_model(cells: list[TensorCell]) -> list[Result[TensorCell]]:
    """All cases of one model in one process: it is traced once."""
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    found = []
    for cell in cells:
        begin = time.perf_counter()
        found.append(run_cell(cell))
        failed = f"  {found[-1].failure}" if found[-1].failure else ""
        seconds = time.perf_counter() - begin
        print(f"{cell.name:40} {worst(found[-1:])}  {seconds:.0f} s{failed}", flush=True)
    return found


def section(results: list[Result[TensorCell]], seconds: float) -> str:
    """The part of the page."""
    failed = [result for result in results if result.failure]
    axes = " x ".join(f"{len(values)} ({axis})" for axis, values in AXES.items())
    told = (
        f"Of {len(ALL)} combinations of {axes} these have every pair of values. As above, each trains "
        f"in float64 ({OWN_STEPS} AdamW steps, {STEPS} of Hugging Face's models) on {PIECES} global "
        "microbatches, plain and under the adversary, within the same bounds. There are two pipeline "
        "ranks where there is a schedule, and with ZeRO two data ranks, over which experts are sharded; "
        "they are cut over `tp` as well. Hugging Face's own casts to float32 (norms, rotary tables, "
        f"routers of {', '.join(HF)}) are lifted to float64, since what passes through them can be "
        "compared no more finely than float32 is; tests/loopback/test_tensor_hf.py also runs these "
        "models as they are written, within the bounds of float32. What does not divide by the "
        "number of ranks stays whole: the tiny models have two heads."
    )
    lines = [
        TENSORS, "",
        *textwrap.wrap("Written by `make matrix` (tests/run_tensor_matrix.py; the cases: "
        "tests/tensor_matrix.py, the models: tests/tensor_zoo.py and tests/zoo_hf.py).", 105), "",
        *textwrap.wrap(told, 105), "",
        f"- torch {torch.__version__}; {seconds / 60:.0f} minutes on {WORKERS} processes",
        f"- **{len(results)} cases, {len(failed)} failed**", "",
    ]  # fmt: skip
    sections: list[tuple[str, Callable[[TensorCell], str]]] = [
        ("way to cut", lambda c: c.way),
        ("model", lambda c: c.model),
        ("schedule", lambda c: c.schedule),
        ("ZeRO", lambda c: str(c.zero)),
        ("ranks", lambda c: str(c.num_ranks)),
    ]
    for title, value in sections:
        lines += table(title, results, value)
    if failed:
        lines += ["### Failures", "", *(f"- `{r.cell.name}`: {r.failure}" for r in failed), ""]
    return "\n".join(lines)


def main() -> int:
    begin = time.perf_counter()
    wanted = [cell for cell in CELLS if all(word in cell.name for word in sys.argv[1:])]
    groups: dict[str, list[TensorCell]] = defaultdict(list)
    for cell in wanted:
        groups[cell.model].append(cell)
    slowest_first = sorted(groups.values(), key=lambda cells: cells[0].model in HF, reverse=True)
    with multiprocessing.get_context("spawn").Pool(WORKERS, maxtasksperchild=1) as pool:
        found = [r for part in pool.imap_unordered(run_model, slowest_first) for r in part]
    place = {cell: number for number, cell in enumerate(wanted)}
    results = sorted(found, key=lambda result: place[result.cell])
    text = section(results, time.perf_counter() - begin)
    print(text)
    if len(wanted) == len(CELLS):
        before = PAGE.read_text().partition(TENSORS)[0].rstrip()
        PAGE.write_text(f"{before}\n\n{text}")
    return any(result.failure for result in results)


if __name__ == "__main__":
    sys.exit(main())
