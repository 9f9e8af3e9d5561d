"""docs/peers.md, from the files of peers.py."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from largest_batch import HEAD, Asked, line
from peers import ROWS, Options, table
from torch_parallel import REGIMES

from piper.ir.form.byte_sizes import show_size

DOCS = Path(__file__).parents[1] / "docs"
LARGEST = Path(__file__).parent / "results" / "largest_batch_gpu.json"


def write(files: list[str], options: Options) -> None:
    about = (DOCS / "peers.in.md").read_text()
    parts = []
    for name in files:
        found = json.loads(Path(name).read_text())
        parts.append(f"torch {found['torch']}, {found['device']}.\n\n{table(found, options)}")
        parts.append("\n".join(verdicts(found)))
        parts.append("What `within` is:")
        parts.append("\n".join(choices(found)))
    made = "Made by `python benchmarks/peers.py --page FILES` from files of `--json`."
    page = about.replace("{{tables}}", "\n\n".join(parts)).replace("{{largest}}", largest())
    (DOCS / "peers.md").write_text(f"{page.rstrip()}\n\n{made}\n")


def largest() -> str:
    """What largest_batch.py found."""
    found = json.loads(LARGEST.read_text())
    asked = Asked("cuda", found["limit"], 64, 1)
    rows = (line(name, row, asked) for name, row in found["rows"].items())
    head = f"torch {found['torch']}, {found['device']}, at most {show_size(asked.limit)} a rank."
    return "\n".join((head, "", HEAD, *rows))


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    """Of each row: Piper, in no more memory if it can, beside its fastest peer, and whether that is
    what is wanted."""
    rows = found["rows"].values()
    for each in sorted(rows, key=lambda each: REGIMES.index(each["regime"])):
        row = next(row for row in ROWS if row.name == each["row"])
        named = f"{row.name}, {each['regime']}"
        sides = {name: side for name, side in each["sides"].items() if side["ms"]}
        peers = [(_middle(side), name) for name, side in sides.items() if "@" in name]
        if "piper" not in sides or not peers:
            yield f"- {named}: **not measured**"
            continue
        fastest, name = min(peers)
        own = [side for side in ("piper", "within") if side in sides]
        fitting = [side for side in own if sides[side]["peak"] <= sides[name]["peak"]]
        best = min(fitting or ["piper"], key=lambda side: _middle(sides[side]))
        ratio = _middle(sides[best]) / fastest
        mine, other = (sides[side]["peak"] / 2**30 for side in (best, name))
        missed = ["time"] * (ratio > row.wanted) + ["memory"] * (mine > other)
        verdict = f"**missed** ({' and '.join(missed)})" if missed else "reached"
        hidden = sides[best].get("exchange_hidden", 1.0)
        more = f"; {hidden:.0%} of all_to_all hidden, wanted 90%" if "experts" in row.name else ""
        yield (
            f"- {named}: {best} {ratio:.2f} of {name.partition('@')[0]}, wanted {row.wanted:g}; "
            f"{mine:.1f} beside {other:.1f} GiB: {verdict}{more}"
        )


def choices(found: dict[str, Any]) -> Iterator[str]:
    """What Piper chose to fit `within` the memory of a peer."""
    for each in found["rows"].values():
        summary = each.get("within", {}).get("summary", "")
        said = re.search(r"^s\..*?\): (gradients .*?|.*again.*?): ", summary, re.M)
        if said and each["sides"].get("within", {}).get("ms"):
            mine, other = (re.search(r"x (\d+) micro", text) for text in (summary, each["summary"]))
            finer = f"{mine[1]} microbatches, " if mine and other and mine[1] != other[1] else ""
            yield f"- {each['row']}, {each['regime']}: {finer}{said[1]}"


def _middle(side: dict[str, Any]) -> float:
    return statistics.median(side["ms"])
