"""Replay: a table and costs in; when each cell runs, how long ranks wait and what they hold out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.schedules.action_costs import Costs
from piper.schedules.legality import check
from piper.schedules.table import Action, Table
from piper.schedules.timing import run


class Replay(msgspec.Struct, frozen=True):
    """A table in time. Every list has one entry per rank."""

    starts: list[list[float]]
    ends: list[list[float]]
    busy: list[float]
    peak_in_flight: list[int]

    @property
    def makespan(self) -> float:
        """From time 0 to the end of the last cell."""
        return max(row[-1] for row in self.ends)

    @property
    def span(self) -> float:
        """The longest time of a rank from its first start to its last end.

        This is a step's cost where steps follow each other without waiting for all ranks.
        """
        return max(
            ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble_of_makespan(self) -> float:
        """The share of the makespan in which ranks wait, on average."""
        return 1 - self._mean_busy / self.makespan if self.makespan else 0.0

    @property
    def bubble_of_span(self) -> float:
        """The share of the span that is not work: the bubble rate of the zero-bubble paper."""
        return 1 - self._mean_busy / self.span if self.span else 0.0

    @property
    def _mean_busy(self) -> float:
        return sum(self.busy) / len(self.busy)


def replay(table: Table, costs: Costs | None = None) -> Replay:
    """Run the table with the given costs (F = BI = BW = 1), each cell as soon as it can."""
    costs = costs or Costs()
    costs.check_stages(table.num_stages)
    progress = run(table, costs)
    if progress.waits or not all(table.rows):
        check(table)  # says why it does not end
    return Replay(
        progress.starts,
        progress.ends,
        [sum(costs.of_cell(cell) for cell in row) for row in table.rows],
        peak_in_flight(table),
    )


def peak_in_flight(table: Table) -> list[int]:
    """The most microbatches a rank holds, each from F to B or BW, counted once per stage."""
    return [round(peak) for peak in peak_held(table)]


def peak_held(table: Table, *, kept: float = 1.0) -> list[float]:
    """The most a rank holds, where a microbatch counts 1 from F to BI and `kept` from BI to BW.

    In an overlapped pair the forward is counted before its backward releases.
    """
    released = {"F": 0.0, "B": 1.0, "BI": 1 - kept, "BW": kept}
    peaks = []
    for row in table.rows:
        held = peak = 0.0
        for cell in row:
            actions: Sequence[Action] = cell.actions
            if cell.joined == "OVERLAP_F_B":
                actions = sorted(actions, key=lambda action: action.kind != "F")
            for action in actions:
                held += action.kind == "F"
                peak = max(peak, held)
                held -= released[action.kind]
        peaks.append(peak)
    return peaks
