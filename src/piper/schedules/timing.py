"""Timing: what an action needs, and rows run side by side, each cell as soon as it can."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.schedules.action_costs import Costs
from piper.schedules.table import Action, Table


class Progress(msgspec.Struct):
    """How far a replay came: a rank that waits for ever has fewer starts than cells."""

    starts: list[list[float]]
    ends: list[list[float]]
    waits: dict[int, Action]  # rank -> what its next cell needs and nobody has run


def inputs(action: Action, num_stages: int) -> Iterator[Action]:
    """What an action needs. A `BI` stands for the input gradient, whether by BI or by B."""
    stage, microbatch, direction = action.stage, action.microbatch, action.direction
    if action.kind == "F":
        if stage > 0:
            yield Action(stage - 1, "F", microbatch, direction)
    elif action.kind == "BW":
        yield Action(stage, "BI", microbatch, direction)
    else:
        yield Action(stage, "F", microbatch, direction)
        if stage + 1 < num_stages:
            yield Action(stage + 1, "BI", microbatch, direction)


def output(action: Action) -> Action:
    """What an action gives to others, in the words of `inputs`."""
    if action.kind == "B":
        return Action(action.stage, "BI", action.microbatch, action.direction)
    return action


def run(table: Table, costs: Costs) -> Progress:
    """Run every row as far as it goes."""
    progress = Progress([[] for _ in table.rows], [[] for _ in table.rows], {})
    done: dict[Action, tuple[float, int]] = {}  # output -> when, on which rank
    sleepers: dict[Action, list[int]] = {}
    ready = list(reversed(range(table.num_ranks)))
    while ready:
        rank = ready.pop()
        row, starts, ends = table.rows[rank], progress.starts[rank], progress.ends[rank]
        while len(ends) < len(row):
            cell = row[len(ends)]
            begin = ends[-1] if ends else 0.0
            inside: set[Action] = set()
            missing = None
            for action in cell.actions:
                for needed in inputs(action, table.num_stages):
                    if needed in inside:
                        continue
                    if needed not in done:
                        missing = needed
                        break
                    when, where = done[needed]
                    begin = max(begin, when if where == rank else when + costs.comm)
                if missing is not None:
                    break
                inside.add(output(action))
            if missing is not None:
                sleepers.setdefault(missing, []).append(rank)
                progress.waits[rank] = missing
                break
            end = begin + costs.of_cell(cell)
            starts.append(begin)
            ends.append(end)
            for made in inside:
                done[made] = (end, rank)
                if made in sleepers:
                    for sleeper in sleepers.pop(made):
                        del progress.waits[sleeper]
                        ready.append(sleeper)
    return progress
