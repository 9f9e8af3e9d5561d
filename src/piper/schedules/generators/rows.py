"""Rows: sequences of forwards and backwards woven into what one rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from piper.schedules.table import Action


def of_kind(actions: Sequence[Action], kind: str) -> list[Action]:
    """The same stages and microbatches as another kind of action."""
    return [Action(a.stage, kind, a.microbatch, a.direction) for a in actions]  # type: ignore[arg-type]


def one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int
) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    row = list(forwards[:warmup])
    for i, backward in enumerate(backwards):
        row += [*forwards[warmup + i : warmup + i + 1], backward]
    return row


def delayed_weights(
    forwards: Sequence[Action], inward: Sequence[Action], *, warmup: int, delay: int
) -> list[Action]:
    """As `one_forward_one_backward`, where each BI is followed by the BW of `delay` BI before."""
    weights = of_kind(inward, "BW")
    row, num_done = [], 0
    for action in one_forward_one_backward(forwards, inward, warmup=warmup):
        row.append(action)
        if action.kind == "BI":
            num_done += 1
            row += weights[num_done - 1 - delay : num_done - delay] if num_done > delay else []
    return row + weights[max(num_done - delay, 0) :]
