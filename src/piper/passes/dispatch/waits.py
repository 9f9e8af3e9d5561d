"""events: which earlier tasks a task must wait for, beyond what its own stream ensures."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def waits_of(
    streams: Sequence[int], after: Sequence[set[int]], blocking: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """The fewest waits that order every task behind the tasks in `after`.

    Tasks are numbered in dispatch order; a stream runs its tasks in that order. A wait also brings
    what the awaited task itself had waited for, so that later waits are often not needed. Nothing is
    dispatched before a `blocking` task is complete, so that nobody need wait for one.
    """
    num_streams = max(streams, default=0) + 1
    known: list[list[int]] = [[-1] * num_streams for _ in range(num_streams)]  # per stream
    seen: list[list[int]] = []  # per task: the last task of each stream that is surely complete
    waits = []
    for index, stream in enumerate(streams):
        mine = known[stream]
        needed = []
        for before in sorted(after[index], reverse=True):
            if streams[before] != stream and mine[streams[before]] < before:
                needed.append(before)
                for other, last in enumerate(seen[before]):
                    mine[other] = max(mine[other], last)
        mine[stream] = index
        seen.append(list(mine))
        if index in blocking:
            for clock in known:
                clock[:] = map(max, clock, mine)
        waits.append(tuple(sorted(needed)))
    return waits
