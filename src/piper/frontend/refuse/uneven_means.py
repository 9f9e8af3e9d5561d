"""Uneven means: a captured microbatch and the example batch in; how many targets each microbatch has.

A mean over targets leaves those of `ignore_index` out. Where microbatches have different numbers of the
others, the mean of their means is not that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of, value_of
from piper.errors import Source
from piper.frontend.capture.capture import Capture
from piper.frontend.capture.counted import mean_call

LOOKED_AT = 64  # microbatches: a plan for thousands of ranks must not cost more than one for a few


@dataclass(frozen=True)
class UnevenMean:
    """A mean loss, and the numbers of targets that it is over in each of the first microbatches."""

    ignored: int
    counts: list[int]
    source: Source | None


def uneven_mean(
    microbatch: Capture, leaves: Mapping[str, Tensor], *, rows: int
) -> UnevenMean | None:
    """The first mean in a microbatch's program whose targets the example batch ignores in part, and not
    in all microbatches alike."""
    if microbatch.count is not None:
        return None
    num = min(next(iter(leaves.values())).shape[0] // rows, LOOKED_AT)
    pieces = [
        {k: leaf[i * rows : (i + 1) * rows] for k, leaf in leaves.items()} for i in range(num)
    ]
    for node in microbatch.graph.nodes:
        call = mean_call(node.target, node.args, node.kwargs)
        target = call.arguments["target"] if call else None
        if call is None or not isinstance(target, fx.Node):
            continue
        if not isinstance(value_of(target), Tensor) or value_of(target).is_floating_point():
            continue
        ignored = call.arguments["ignore_index"]
        try:
            found = [_evaluated(microbatch, target, piece) for piece in pieces]
        except Exception:  # it depends on more than the batch, or is not code that runs by itself
            continue
        counts = [int((targets != ignored).sum()) for targets in found]
        if len(set(counts)) > 1:
            return UnevenMean(ignored, counts, source_of(node))
    return None


def _evaluated(capture: Capture, wanted: fx.Node, leaves: Mapping[str, Tensor]) -> Tensor:
    """What a node is for some rows of a batch; raises KeyError if it depends on the model."""
    values: dict[fx.Node, Any] = {}
    needed, stack = {wanted}, [wanted]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg not in needed:
                needed.add(arg)
                stack.append(arg)
    for node in capture.graph.nodes:
        if node not in needed:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = leaves[capture.origins[node].name]
        elif node.op == "get_attr":
            values[node] = capture.constants[str(node.target)]
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    found: Tensor = values[wanted]
    return found
