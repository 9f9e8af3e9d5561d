"""Warnings: a lowered program whose loss does not mean, cut into microbatches, what it meant uncut."""

from __future__ import annotations

import warnings

from piper.compiler.source import Source
from piper.frontend.refuse.loss_growth import growing_sum
from piper.frontend.refuse.uneven_means import uneven_mean
from piper.plan.types import Plan


def warn_of_loss(source: Source, plan: Plan) -> None:
    """Say so where the loss is averaged over global microbatches although it grows with their rows, or
    although they have different numbers of targets that a mean is over."""
    pieces = plan.num_data_ranks * plan.num_microbatches
    if pieces == 1:
        return
    rows = source.batch_size // pieces
    line = growing_sum(source.captured(rows), source.captured(source.batch_size))
    if line is not None:
        warnings.warn(
            f"step returns a sum over the batch ({line}), which is taken for a mean loss: it and its "
            f"gradients are averaged over {pieces} global microbatches; return a mean, or (sum, count) "
            "to have the sum divided by the total count",
            stacklevel=5,  # of lower, which is wrapped
        )
    found = uneven_mean(source.captured(rows), source.leaves, rows=rows)
    if found is not None:
        warnings.warn(
            f"step returns a mean over targets other than {found.ignored} ({found.source}), of which "
            f"{len(found.counts)} global microbatches of the example batch have {min(found.counts)} "
            f"to {max(found.counts)}: each microbatch counts alike, and so a target counts more where "
            'there are fewer; with trace(..., mean="batch"), or --mean batch, each target of the batch '
            "counts alike",
            stacklevel=5,  # of lower, which is wrapped
        )
