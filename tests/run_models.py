"""Models as people have them in; docs/models.md out. Written by `make models`.

Every model is tried in a process of its own: a crash is a row of the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.hf_classes import CLASSES, try_class
from tests.large_models import LARGE, measure
from tests.model_trial import OF_EXPERTS, STRATEGIES, Trial, try_model
from tests.zoo_more import MIXTURES, MODELS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TIMEOUT, WORKERS = 900, 2
LONGEST = 300  # characters of a reason
PACKAGES = re.compile(r"[^ (]*site-packages/")


def try_tiny(name: str) -> Trial:
    return try_model(name, MODELS[name](), [*STRATEGIES, *(OF_EXPERTS if name in MIXTURES else ())])


def alone(function: Callable[[str], Any], name: str) -> dict[str, Any]:
    """The fields of a function's result, from a process that this one forks."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(its, function, name))
    process.start()
    its.close()
    try:
        row = mine.recv() if mine.poll(TIMEOUT) else {"failed": {"time": f"over {TIMEOUT} s"}}
    except EOFError:
        process.join()
        row = {"failed": {"process": f"ended with {process.exitcode}"}}
    process.kill()
    process.join()
    row = {"name": name, **row}
    print(row, flush=True)
    return row


def _send(pipe: Connection, function: Callable[[str], Any], name: str) -> None:
    torch.set_num_threads(1)
    pipe.send(asdict(function(name)))


def rows_of(part: str, results: Path | None, *, page_only: bool) -> list[dict[str, Any]]:
    """The rows of a part: those of the results, then what is not among them is tried."""
    function, names = PARTS[part]
    lines = results.read_text().splitlines() if results and results.exists() else []
    known = {row["name"]: row for row in map(json.loads, lines)}

    def row(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = alone(function, name)
            if results:
                with results.open("a") as file:
                    file.write(json.dumps(known[name]) + "\n")
        return known[name]

    wanted = [name for name in names if name in known or not page_only]
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(row, wanted))


TINY = """\
Written by `make models` (tests/run_models.py). Models are those of transformers {transformers} and
torch {torch}, unmodified, in tiny configurations made by hand (tests/zoo_hf.py, tests/zoo_more.py).

Each trains two AdamW steps in float64, all ranks in one process under the adversary. The oracle of
`piper verify` holds it to one device: a number is the largest relative error of a gradient, below
1e-10. Operations that a model does in float32 whatever its dtype are counted, and lifted to float64
for the comparison. Seconds are of the CPU.
"""
LARGE_SIZE = """\
Models at full size are traced on fake tensors and lowered to pp 8 x dp 8 with ZeRO-2 under 1F1B, 8
microbatches of 2 rows of 128 tokens. Seconds are of the CPU, on one core; memory is the largest of
the process.
"""
OTHERS = """\
These are the classes of transformers for causal language models, for text and for images whose
configurations become tiny by the usual names of their fields (tests/hf_classes.py). Each is held to
one device in one AdamW step under dp 2. {run} classes of {tried} run eagerly in that way:
**{trains} train, {refused} are refused, {crashes} crash**, {differs} differ.
"""


def _mark(row: dict[str, Any], strategy: str) -> str:
    if strategy in row.get("exact", {}):
        return f"{row['exact'][strategy]:.0e}"
    marks = {"refused": "refused", "failed": "**fails**"}
    return next((mark for kind, mark in marks.items() if strategy in row.get(kind, {})), "")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head], *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _tiny_row(row: dict[str, Any]) -> Iterable[str]:
    yield row["name"]
    yield f"{row.get('seconds', 0):.1f} s"
    yield str(row.get("islands") or "")
    yield from (_mark(row, strategy) for strategy in (*STRATEGIES, *OF_EXPERTS))


def _large_row(row: dict[str, Any]) -> Iterable[str]:
    yield row["name"]
    yield f"{row['parameters'] / 1e9:.1f} billion"
    yield from (f"{row[part]:.0f} s" for part in ("trace", "lower"))
    yield f"{row['peak'] / 2**30:.2f} GiB"


def _reasons(rows: Iterable[dict[str, Any]]) -> str:
    """A line per model and reason that something did not train."""
    lines = []
    for row in rows:
        why: dict[str, list[str]] = {}
        for kind in ("refused", "failed"):
            for what, text in row.get(kind, {}).items():
                text = " ".join(PACKAGES.sub("", text).split())[:LONGEST]
                why.setdefault(text, []).append(what)
        lines += [f"- {row['name']} ({'; '.join(what)}): {text}\n" for text, what in why.items()]
    return "".join(lines)


def _untried(rows: dict[str, list[dict[str, Any]]]) -> str:
    """What `--page-only` leaves out, so that nobody takes a missing row for a model without faults."""
    tried = {row["name"] for part in rows.values() for row in part}
    names = [name for name in (*MODELS, *LARGE) if name not in tried]
    others = sum(name not in tried for name in CLASSES)
    names += [f"{others} other classes of transformers"] if others else []
    return f"Not tried in this run: {', '.join(names)}.\n" if names else ""


def _full_size(rows: list[dict[str, Any]]) -> Iterable[str]:
    head = ("model", "parameters", "trace", "lower", "peak memory")
    yield "## Full size\n"
    yield LARGE_SIZE
    yield _table(head, (_large_row(row) for row in rows if "peak" in row))
    yield _reasons(rows)


def _others(rows: list[dict[str, Any]]) -> Iterable[str]:
    ran = [row for row in rows if row.get("outcome") != "does not run eagerly"]
    counts = Counter(row.get("outcome", "crashes") for row in ran)
    outcomes = ("trains", "refused", "crashes", "differs")
    yield "## Other classes of transformers\n"
    yield OTHERS.format(run=len(ran), tried=len(rows), **{name: counts[name] for name in outcomes})
    yield _reasons(ran)


def page(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The page with all tables."""
    parts = [
        "# Models\n",
        TINY.format(transformers=transformers.__version__, torch=torch.__version__),
        _table(
            ("model", "trace", "in float32", *STRATEGIES, *OF_EXPERTS), map(_tiny_row, rows["tiny"])
        ),
        _reasons(rows["tiny"]),
        *(_full_size(rows["large"]) if rows["large"] else ()),
        _untried(rows),
        *(_others(rows["classes"]) if rows["classes"] else ()),
    ]
    return "\n".join(part for part in parts if part)


PARTS: dict[str, tuple[Callable[[str], Any], Iterable[str]]] = {
    "large": (measure, LARGE),
    "tiny": (try_tiny, MODELS),
    "classes": (try_class, CLASSES),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="rows of earlier runs, which are kept")
    parser.add_argument("--page-only", action="store_true", help="of the results alone")
    options = parser.parse_args()
    rows = {part: rows_of(part, options.results, page_only=options.page_only) for part in PARTS}
    PAGE.write_text(page(rows))
    return int(any(row.get("failed") for part in rows.values() for row in part))


if __name__ == "__main__":
    sys.exit(main())
