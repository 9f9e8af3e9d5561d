"""mixture: rows and the experts that each has chosen in; what those make of them, added up, out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from piper.bodies.row_ops import put_rows, sort_experts, take_rows
from piper.frontend.annotate import annotate

EXPERTS = "EP"


def mixture(
    experts: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Each of `rows` [N, d] through its experts `chosen` [N, k], by `weights` [N, k]; none is dropped.

    `experts(rows, counts)` takes rows sorted by expert, of which expert e has `counts[e]`, and gives as
    many back. It is the region EP=0, 1, ... that `shard` splits; `after` works on each row behind it.
    """
    num_chosen = chosen.shape[-1]
    expert = chosen.reshape(-1)
    order, counts = sort_experts(expert, num_experts)
    taken = take_rows(rows, order, num_chosen)
    with annotate(EXPERTS):
        made = experts(taken, counts)
    made = after(made) if after else made
    made = put_rows(made, order)
    if num_chosen == 1:
        return (made * weights.reshape(-1, 1)).to(rows.dtype)
    made = made.reshape(-1, num_chosen, made.shape[-1])
    return (made * weights.reshape(-1, num_chosen, 1)).sum(1).to(rows.dtype)
