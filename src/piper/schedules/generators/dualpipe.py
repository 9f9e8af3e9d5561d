"""DualPipe and DualPipeV (DeepSeek): forwards of one way overlap with backwards of the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from piper.schedules.generators.request import check_sizes, refuse
from piper.schedules.generators.stage_placement import bidirectional, vee
from piper.schedules.table import Action, Cell, Table, make_table, pair

Make = Callable[[str, int], Action]  # kind and microbatch -> action


def dualpipe(*, num_ranks: int, num_microbatches: int) -> Table:
    """Two copies of the pipeline in opposite directions, each with half of the microbatches.

    Placement: bidirectional
    Bubble: (PP/2-1)(F&B+B-3BW)
    Memory: PP+1
    Requires: an even number of ranks; M even, at least 2PP
    Trades: A forward and a backward hide each other's exchanges; all parameters are there twice.
    Published: DeepSeek-V3 Technical Report, arXiv 2412.19437
    """
    name = "dualpipe"
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_ranks % 2:
        refuse(
            name,
            f"{num_ranks} ranks have no middle",
            legal=f"an even number: {num_ranks + 1} ranks",
        )
    least = max(2 * num_ranks, num_microbatches + num_microbatches % 2)
    if num_microbatches != least:
        refuse(
            name,
            f"{num_microbatches} microbatches do not fill {num_ranks} ranks both ways",
            legal=f"an even number, at least twice the ranks: {least} microbatches",
        )
    half = num_ranks // 2
    rows = []
    for rank in range(num_ranks):
        makers = [
            _maker(stage, direction)
            for direction, stage in enumerate(bidirectional(rank, num_ranks))
        ]
        # The second half of the ranks is the first one seen from the other end.
        near, far = makers if rank < half else reversed(makers)
        depth = min(rank, num_ranks - 1 - rank)
        rows.append(list(_row(near, far, depth, half, num_microbatches // 2)))
    return make_table(
        name,
        rows,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        num_directions=2,
    )


def dualpipev(*, num_ranks: int, num_microbatches: int) -> Table:
    """DualPipe cut in half: the second direction is the way up of a V.

    DeepSeek's formulas count the 2PP stages.

    Placement: vee
    Bubble: (PP-1)(F&B+B-3BW)
    Memory: 2PP+1
    Requires: M at least 2PP
    Trades: A forward and a backward hide each other's exchanges, with one copy of the parameters.
    Published: DualPipe and DualPipeV, https://github.com/deepseek-ai/DualPipe
    """
    name = "dualpipev"
    check_sizes(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks:
        refuse(
            name,
            f"{num_microbatches} microbatches do not fill {num_ranks} ranks down and up",
            legal=f"at least twice the ranks: {2 * num_ranks} microbatches",
        )
    rows = []
    for rank in range(num_ranks):
        down, up = vee(rank, num_ranks)
        rows.append(list(_row(_maker(down), _maker(up), rank, num_ranks, num_microbatches)))
    return make_table(name, rows, num_stages=2 * num_ranks, num_microbatches=num_microbatches)


def _maker(stage: int, direction: int | None = None) -> Make:
    return lambda kind, microbatch: Action(stage, kind, microbatch, direction)  # type: ignore[arg-type]


def _row(
    near: Make, far: Make, rank: int, num_ranks: int, num_microbatches: int
) -> Iterator[Action | Cell]:
    """What rank `rank` of a V of `num_ranks` runs: `near` on the way in, `far` on the way back."""
    later = num_ranks - 1 - rank
    counts = {(make, kind): 0 for make in (near, far) for kind in ("F", "B")}
    weights: deque[Action] = deque()

    def take(make: Make, kind: str) -> Action:
        phase = "F" if kind == "F" else "B"
        counts[make, phase] += 1
        return make(kind, counts[make, phase] - 1)

    def inward(make: Make) -> Action:
        action = take(make, "BI")
        weights.append(make("BW", action.microbatch))
        return action

    for _ in range(2 * later):  # fill the way in
        yield take(near, "F")
    for _ in range(rank + 1):  # until the first one is back
        yield take(near, "F")
        yield take(far, "F")
    for _ in range(later):  # the way back has its gradients
        yield inward(far)
        yield weights.popleft()
        yield take(far, "F")
    for i in range(num_microbatches - 2 * num_ranks + rank + 1):  # both ways, overlapped
        if i == 0 and rank == num_ranks - 1:
            yield take(near, "F")  # here the gradient has not been sent yet: nothing to overlap
            yield take(far, "B")
        else:
            yield pair(take(near, "F"), take(far, "B"))
        yield pair(take(far, "F"), take(near, "B"))
    for _ in range(later):  # the way in has no more forwards
        yield take(far, "B")
        yield pair(take(far, "F"), take(near, "B"))
    for i in range(2 * (rank + 1)):  # only backwards: the second half of them puts off its BW
        make = near if i % 2 else far
        yield take(make, "B") if i < rank + 1 else inward(make)
    for _ in range(later):
        yield weights.popleft()
        yield inward(near)
    yield from weights
