"""docs/scale.md and its pictures, from the files of scale_study.py and the words of docs/scale.in.md.

In the words `{{qwen3|2048|ZBV|mfu}}` is a figure of a case, `{{qwen3|2048|fitting}}` one of a table, and
`{{CPU|error}}` one of docs/prediction.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from scale_models import LABELS
from scale_pictures import lines_svg, memory_svg
from scale_study import CASES, RESULTS

from piper.schedules import schedule

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
CARD = 80e9  # bytes of an H100; its 80 GiB leave the rest to the context and to NCCL's buffers
SCHEDULES = ("1F1B", "interleaved 1F1B", "ZBV", "DualPipeV")  # in every table
PERCENT = r"([-+][\d.]+)%"
HEAD = (
    "| strategy | microbatches | step | one latency | tokens/s/GPU | MFU | computes | exposed | bubble "
    "| all_to_all hidden | peak of a rank | compile |\n" + "|---" * 12 + "|"
)

Found = dict[str, Any]
Case = dict[str, Any]


def results() -> Found:
    """What was found of each model."""
    return {
        model: json.loads((RESULTS / f"scale_{model}.json").read_text())
        for model in LABELS
        if (RESULTS / f"scale_{model}.json").exists()
    }


def cases_of(found: Found, model: str) -> list[Case]:
    """By GPUs, in the order of the study."""
    known = found[model]["cases"]
    cases = sorted((case for case in CASES if case.model == model), key=lambda case: case.gpus)
    return [known[case.key] for case in cases if case.key in known]


def fits(case: Case) -> bool:
    return bool(case["bytes"] <= CARD)


def row(case: Case) -> str:
    name, micro = case["name"], case["strategy"]["microbatches"]
    if "refused" in case:
        return f"| {name} | {micro} | refused: {first_line(case['refused'])} |" + " |" * 9
    direct = f"{case['direct_seconds']:.2f} s" if "direct_seconds" in case else ""
    hidden = "" if case["exchange_hidden"] is None else f"{case['exchange_hidden']:.0%}"
    peak = f"{case['bytes'] / 1e9:.0f} GB"
    compile_s = case["lower_s"] + case["simulate_s"]
    return (
        f"| {name} | {micro} | {case['seconds']:.2f} s | {direct} "
        f"| {case['tokens'] / case['seconds'] / case['gpus']:,.0f} | {case['mfu']:.1%} "
        f"| {case['computing']:.0%} | {case['exposed']:.0%} | {case['bubble']:.0%} | {hidden} "
        f"| {peak if fits(case) else f'**{peak}**'} | {compile_s:.0f} s |"
    )


def first_line(error: str) -> str:
    """Without the place in a file of ours or of the environment."""
    return re.sub(r" \([\w/.]+:\d+\)", "", error.partition("\n")[0])


def tables(found: Found) -> Iterator[str]:
    for model, label in LABELS.items():
        cases = cases_of(found, model)
        for gpus in sorted({case["gpus"] for case in cases}):
            mine = [case for case in cases if case["gpus"] == gpus]
            strategy = mine[0]["strategy"]
            million = mine[0]["tokens"] / 1e6
            yield f"### {label} on {gpus:,} GPUs"
            yield (
                f"{million:.1f} million tokens in a step. PP{strategy['pp']} and EP{strategy['ep']}, "
                "ZeRO-1, everything computed again, where the name says nothing else."
            )
            yield "\n".join((HEAD, *map(row, mine)))


def records(case: Case) -> bool:
    """Whether it was the first of its process, and so recorded the model again: no other takes so long
    for that and for cutting chunks."""
    return bool(case["capture_s"] > 30)


def made(found: Found) -> str:
    """What making the plans took."""
    lines = [
        "| model | trace | first lowering | lowering after it | simulate | nodes | peak memory |",
        "|---" * 7 + "|",
    ]
    for model, label in LABELS.items():
        cases = [case for case in cases_of(found, model) if "nodes" in case]
        firsts = [case["lower_s"] for case in cases if records(case)]
        later = sorted(case["lower_s"] for case in cases if not records(case))
        traces = found[model]["traces"].values()
        lines.append(
            f"| {label} | {min(traces):.0f} to {max(traces):.0f} s "
            f"| {min(firsts):.0f} to {max(firsts):.0f} s "
            f"| {later[0]:.0f} to {later[-1]:.0f} s "
            f"| {min(c['simulate_s'] for c in cases):.1f} to "
            f"{max(c['simulate_s'] for c in cases):.1f} s "
            f"| {min(c['nodes'] for c in cases):,} to {max(c['nodes'] for c in cases):,} "
            f"| {max(c['peak_gib'] for c in cases):.1f} GiB |"
        )
    return "\n".join(lines)


def waiting(case: Case) -> int:
    """The most BWs that a rank's table has put off at once: their BIs have run, and they have not."""
    asked = case["strategy"]
    sizes = {"num_ranks": asked["pp"], "num_microbatches": asked["microbatches"]}
    change, most = {"BI": 1, "BW": -1}, 0
    for row in schedule(asked["schedule"], **sizes).rows:
        kinds = [action.kind for cell in row for action in cell.actions]
        most = max(most, *accumulate(change.get(kind, 0) for kind in kinds))
    return most


def seconds(value: float) -> str:
    """Two digits of it."""
    return f"{float(f'{value:.2g}'):g} s"


FIGURES: dict[str, Callable[[Case], str]] = {
    "direct": lambda case: seconds(case["direct_seconds"]),
    "mfu": lambda case: f"{case['mfu']:.0%}",
    "step": lambda case: seconds(case["seconds"]),
    "exchange": lambda case: seconds(case["exchange_s"]),
    "waiting": lambda case: str(waiting(case)),
    "optimizer": lambda case: f"{case['bytes_by_category']['optimizer'] / 1e9:.0f} GB",
    "exposed": lambda case: f"{case['exposed']:.0%}",
    "bubble": lambda case: f"{case['bubble']:.0%}",
    "computes": lambda case: f"{case['computing']:.0%}",
    "hidden": lambda case: f"{case['exchange_hidden']:.0%}",
    "peak": lambda case: f"{case['bytes'] / 1e9:.0f} GB",
    "saved": lambda case: f"{case['bytes_by_category']['saved'] / 1e9:.0f} GB",
    "micro": lambda case: str(case["strategy"]["microbatches"]),
    "refused": lambda case: first_line(case["refused"]),
}


def by_speed(found: Found, model: str, gpus: int, *, fitting: bool) -> list[Case]:
    """Of one table the cases that fit into a card, or those that do not, the fastest first."""
    cases = [case for case in cases_of(found, model) if case["gpus"] == gpus]
    cases = [case for case in cases if "refused" not in case and fits(case) == fitting]
    return sorted(cases, key=lambda case: float(case["seconds"]))


def listed(cases: list[Case]) -> str:
    """`1F1B, ZBV and V-Min`, without those that change more than the schedule."""
    *most, last = [case["name"] for case in cases if case["name"] in SCHEDULES] or ["none"]
    return f"{', '.join(most)} and {last}" if most else str(last)


TABLES: dict[str, Callable[[Found, str, int], str]] = {
    "fitting": lambda *table: listed(by_speed(*table, fitting=True)),
    "fastest": lambda *table: next((c["name"] for c in by_speed(*table, fitting=True)), "none"),
    "smallest": lambda *table: min(by_speed(*table, fitting=False), key=_bytes)["name"].replace(
        ", ", " with "
    ),
    "least": lambda *table: (
        f"{_bytes(min(by_speed(*table, fitting=False), key=_bytes)) / 1e9:.0f} GB"
    ),
}


def _bytes(case: Case) -> float:
    return float(case["bytes"])


def what_fits(found: Found) -> str:
    """A line per table of the page: plans that fit a card, and those that do not."""
    lines = ["| model | GPUs | fit into 80 GB, the fastest first | need more |", "|---" * 4 + "|"]
    for model, label in LABELS.items():
        for gpus in sorted({case["gpus"] for case in cases_of(found, model)}):
            fit, beyond = (
                ", ".join(
                    f"{case['name'].replace(', ', ' ')} ({seconds(case['seconds'])})"
                    if fitting
                    else f"{case['name'].replace(', ', ' ')} ({case['bytes'] / 1e9:.0f} GB)"
                    for case in by_speed(found, model, gpus, fitting=fitting)
                )
                for fitting in (True, False)
            )
            lines.append(f"| {label} | {gpus:,} | {fit or 'none'} | {beyond} |")
    return "\n".join(lines)


def checked() -> dict[str, dict[str, str]]:
    """Of each table of docs/prediction.md: its rounds, and the largest errors."""
    _, *parts = (DOCS / "prediction.md").read_text().split("\n## ")
    found = {}
    for part in parts:
        rounds = re.search(r"^(\d+) rounds of (\d+) steps", part, re.M)
        rows = [line.split("|") for line in part.splitlines() if re.match(r"\|.* ms \|", line)]
        assert rounds and rows, part
        alone = [abs(float(percent)) for row in rows for percent in re.findall(PERCENT, row[5])]
        found["GPU" if "GPU" in part.partition("\n")[0] else "CPU"] = {
            "error": f"{max(abs(float(row[4].strip(' %'))) for row in rows):.0f} %",
            "alone": f"{max(alone):.0f} %",
            "rounds": "one round" if rounds[1] == "1" else f"{rounds[1]} rounds",
            "steps": rounds[2],
        }
    return found


def filled(words: str, found: Found) -> str:
    measured = checked()

    def figure(match: re.Match[str]) -> str:
        *place, what = match[1].split("|")
        if len(place) == 1:
            return measured[place[0]][what]
        model, gpus = place[0], int(place[1])
        if len(place) == 2:
            return TABLES[what](found, model, gpus)
        return FIGURES[what](found[model]["cases"][f"{gpus} GPUs, {place[2]}"])

    return re.sub(r"\{\{([^{}]+\|[^{}]+)\}\}", figure, words)


def page(found: Found) -> str:
    about = filled((DOCS / "scale.in.md").read_text(), found)
    torch = next(iter(found.values()))["torch"]
    about = about.replace("{{tables}}", "\n\n".join(tables(found)))
    about = about.replace("{{fits}}", what_fits(found))
    about = about.replace("{{made}}", made(found)).replace("{{torch}}", torch)
    assert "{{" not in about, "a figure of docs/scale.in.md is unknown"
    written = "Made by `python benchmarks/scale_study.py`, and written by it with `--page`."
    return f"{about.rstrip()}\n\n{written}\n"


def pictures(found: Found) -> dict[str, str]:
    """Per file in docs/pictures."""
    by_file = {}
    for model, label in LABELS.items():
        cases = [case for case in cases_of(found, model) if "seconds" in case]
        by_file[f"scale_{model}.svg"] = lines_svg(f"{label}: predicted MFU", cases, CARD)
        large = [case for case in cases if case["gpus"] == 2048]
        by_file[f"scale_{model}_memory.svg"] = memory_svg(
            f"{label} on 2,048 GPUs: planned peak of the fullest rank", large, CARD
        )
    return by_file


def write() -> None:
    found = results()
    (DOCS / "scale.md").write_text(page(found))
    for name, svg in pictures(found).items():
        (PICTURES / name).write_text(svg)
    print(f"wrote docs/scale.md: {sum(len(each['cases']) for each in found.values())} cases")
