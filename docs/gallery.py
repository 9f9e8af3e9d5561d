"""The gallery: the catalogue of schedules in; a page, and a picture of each at the same size, out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from piper.schedules import SCHEDULES, Replay, Table, draw_svg, replay, schedule

RANKS, MICROBATCHES = 4, 8
FOLDER = "pictures/gallery"
TEMPLATE = Path(__file__).with_name("gallery.in.md")
# Pictures have a background of their own; where the reader prefers dark pages it is dark.
# Text beside bars is then light, and names inside of bars stay as they are.
DARK = """<style>@media (prefers-color-scheme: dark) {
svg > rect:first-of-type { fill: #1e2129 }
svg > text { fill: #d5d9e0 }
svg > path { stroke: #ffffff33 }
}</style>
"""


@dataclass(frozen=True)
class Entry:
    """What a schedule trades for what, and where it was published."""

    trade: str
    source: str
    link: str


def _arxiv(number: str, what: str) -> tuple[str, str]:
    return f"{what}, arXiv {number}", f"https://arxiv.org/abs/{number}"


_ZERO_BUBBLE = _arxiv("2401.10241", "Zero Bubble Pipeline Parallelism")
_MEMORY = _arxiv("2405.15362", "Pipeline Parallelism with Controllable Memory")
_DEEPSEEK = _arxiv("2412.19437", "DeepSeek-V3 Technical Report")
ENTRIES = {
    "gpipe": Entry(
        "The simplest order: it pays with memory, since every microbatch is held at once.",
        *_arxiv("1811.06965", "GPipe"),
    ),
    "1f1b": Entry(
        "As long as GPipe, but a rank holds only as many microbatches as there are ranks from it on.",
        *_arxiv("2006.09503", "PipeDream-Flush"),
    ),
    "eager_1f1b": Entry(
        "1F1B with more forwards ahead: it holds more, and messages have time to arrive.",
        *_arxiv("2211.05322", "On Optimizing the Communication of Model Parallelism"),
    ),
    "looped_bfs": Entry(
        "Several stages a rank make the bubble smaller; all microbatches of all of them are held.",
        *_arxiv("2211.05953", "Breadth-First Pipeline Parallelism"),
    ),
    "interleaved_1f1b": Entry(
        "The small bubble of several stages a rank for less memory; messages are twice as many.",
        *_arxiv("2104.04473", "Efficient Large-Scale Language Model Training, Megatron-LM"),
    ),
    "zb_h1": Entry(
        "Backwards in two halves fill what 1F1B left idle, for the memory of 1F1B's first rank.",
        *_ZERO_BUBBLE,
    ),
    "zb_h2": Entry(
        "No bubble between the first and the last rank's work, for almost twice the memory.",
        *_ZERO_BUBBLE,
    ),
    "interleaved_zb": Entry(
        "Half the warm-up of interleaved 1F1B, and weight halves where a rank would wait: less bubble "
        "and less memory, for as many messages.",
        "torch.distributed.pipelining, ScheduleInterleavedZeroBubble",
        "https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    ),
    "zbv": Entry(
        "Two stages a rank in a V: no bubble inside of a rank's work, for the memory of 1F1B; a rank "
        "sends twice as many messages.",
        *_ZERO_BUBBLE,
    ),
    "v_half": Entry(
        "A tighter V: on many ranks half of what 1F1B holds, for some bubble.",
        *_MEMORY,
    ),
    "v_min": Entry(
        "The tightest V: on many ranks a third of what 1F1B holds, for more bubble.",
        *_MEMORY,
    ),
    "dualpipe": Entry(
        "Two directions at once, in which forwards and backwards overlap and hide each other's "
        "communication; each direction has its own copy of all parameters.",
        *_DEEPSEEK,
    ),
    "dualpipev": Entry(
        "The overlap of DualPipe with one copy of the parameters: the second direction is the way "
        "up of a V.",
        "DualPipe and DualPipeV, DeepSeek",
        "https://github.com/deepseek-ai/DualPipe",
    ),
    "auto": Entry(
        "A search: the shortest table that it finds for given costs, within a limit on memory.",
        *_ZERO_BUBBLE,
    ),
}


def for_both_modes(svg: str) -> str:
    """A picture that is readable on a light and on a dark page."""
    head, tag, rest = svg.partition("<title>")
    return f"{head}{DARK}{tag}{rest}"


def files(note: str) -> dict[str, str]:
    """The page and its pictures by their paths under docs/."""
    rows, parts, drawn = [], [], {}
    for name in SCHEDULES:
        table = schedule(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
        replayed = replay(table)
        path = f"{FOLDER}/{name}.svg"
        drawn[path] = for_both_modes(draw_svg(table, replayed))
        rows.append(_row(name, table, replayed))
        parts.append(_part(name, path))
    page = TEMPLATE.read_text().format(
        note=note,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        rows="\n".join(rows),
        parts="\n".join(parts),
    )
    return {"gallery.md": page, **drawn}


def held(table: Table, replayed: Replay) -> float:
    """The most microbatches that a rank holds, each counted with all the layers of a rank."""
    per_rank = table.stages_per_rank if table.num_directions == 1 else 1
    return max(replayed.peak_in_flight) / per_rank


def _row(name: str, table: Table, replayed: Replay) -> str:
    return (
        f"| [{name}](#{name}) | {table.stages_per_rank} | {replayed.bubble_of_makespan:.1%} "
        f"| {replayed.bubble_of_span:.1%} | {held(table, replayed):g} | {table.num_directions} |"
    )


def _part(name: str, path: str) -> str:
    entry = ENTRIES[name]
    command = f"piper schedule {name} --ranks {RANKS} --microbatches {MICROBATCHES}"
    return (
        f"## {name}\n\n![{name} on {RANKS} ranks with {MICROBATCHES} microbatches]({path})\n\n"
        f"{entry.trade}\nPublished: [{entry.source}]({entry.link}).\n\n"
        f"```console\n$ {command}\n```\n"
    )
