"""A table and its replay in, their Timeline out, and the pictures of it."""

from __future__ import annotations

from piper.ir.nodes import COMPUTE, Tags
from piper.observe.pictures import characters, svg
from piper.observe.timeline import MICROBATCH, Label, Timeline, Track
from piper.schedules.replay import Replay
from piper.schedules.table import Action, Cell, Table

STAGE, DIRECTION = "PP", "DIR"


def table_timeline(table: Table, replay: Replay) -> Timeline:
    """One span for each cell, in the table's own unit of time."""
    tracks = []
    for rank, row in enumerate(table.rows):
        track = Track(f"rank {rank}", (rank,), tuple(map(_label, row)), begins=[0])
        for cell, times in enumerate(zip(replay.starts[rank], replay.ends[rank], strict=True)):
            start, end = times
            track.add(cell, start, start, end)
        tracks.append(track)
    return Timeline("table", tracks, [(0.0, replay.makespan)], unit="")


def draw_text(table: Table, replay: Replay, *, width: int = 100, color: bool = False) -> str:
    """One line per rank, time to the right, in bands that fit the width."""
    return characters.draw_text(table_timeline(table, replay), width=width, color=color)


def draw_svg(table: Table, replay: Replay) -> str:
    """One row per rank, time to the right, each bar with its action as label and tooltip."""
    title = f"{table.name}: {table.num_ranks} ranks, {table.num_microbatches} microbatches"
    return svg.draw_svg(table_timeline(table, replay), title=title)


def _label(cell: Cell) -> Label:
    name = ("&" if cell.joined == "OVERLAP_F_B" else "+").join(map(str, cell.actions))
    first, *others = map(_tags, cell.actions)
    common = tuple(tag for tag in first if all(tag in tags for tags in others))
    return Label(name, "run", COMPUTE, phase=_phase(cell), tags=common)


def _phase(cell: Cell) -> str:
    kinds = {action.kind for action in cell.actions}
    if len(cell.actions) == 1:
        return cell.actions[0].kind
    return "F&B" if "F" in kinds else "B"


def _tags(action: Action) -> Tags:
    tags = [(STAGE, action.stage), (MICROBATCH, action.microbatch)]
    if action.direction is not None:
        tags.append((DIRECTION, action.direction))
    return tuple(tags)
