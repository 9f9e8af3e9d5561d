"""A warning: a lowered program whose step returns a sum, which a plan takes for a mean."""

from __future__ import annotations

import warnings

from piper.compiler.source import Source
from piper.frontend.refuse.loss_growth import growing_sum
from piper.plan.types import Plan


def warn_of_sum(source: Source, plan: Plan) -> None:
    """Say so where the loss is averaged over global microbatches although it grows with their rows."""
    pieces = plan.num_data_ranks * plan.num_microbatches
    if pieces == 1:
        return
    sizes = (source.batch_size // pieces, source.batch_size)
    line = growing_sum(*(source.captured(rows) for rows in sizes))
    if line is not None:
        warnings.warn(
            f"step returns a sum over the batch ({line}), which is taken for a mean loss: it and its "
            f"gradients are averaged over {pieces} global microbatches; return a mean, or (sum, count) "
            "to have the sum divided by the total count",
            stacklevel=3,
        )
