"""Islands: where the code of a float64 model computes in a narrower dtype all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from piper.bodies.captured_nodes import callee, source_of, value_of
from piper.bodies.leaves import tensors_in
from piper.errors import Source
from piper.frontend.capture.capture import Capture
from piper.frontend.capture.lifted import WIDE
from piper.frontend.cut.regions import module_paths


@dataclass(frozen=True)
class Island:
    """A line whose operator leaves float64: its dtype, the first module that runs it, how often."""

    source: Source | None
    operator: str
    dtype: str
    module: str
    count: int


def islands(capture: Capture) -> list[Island]:
    """Where numbers become narrow, in the order of the trace; equal lines once."""
    found: dict[tuple[Source | None, str, str], Island] = {}
    for node in capture.graph.nodes:
        dtype = _narrow(node)
        if dtype is None or any(_narrow(arg) for arg in node.all_input_nodes):
            continue
        key = source_of(node), callee(node), str(dtype).removeprefix("torch.")
        known = found.get(key) or Island(*key, (module_paths(node) or [""])[-1], 0)
        found[key] = replace(known, count=known.count + 1)
    return list(found.values())


def narrowest(capture: Capture) -> torch.dtype | None:
    """The narrowest dtype in which numbers of floating point are computed, if it is below float64.

    Numbers made of integers alone, and widened at once, do not count: they are equal wherever made.
    """
    found = {_narrow(node) for node in capture.graph.nodes if _reads_floats(node)}
    return max((d for d in found if d is not None), key=lambda d: torch.finfo(d).eps, default=None)


def _reads_floats(node: fx.Node) -> bool:
    read = [t.dtype for arg in node.all_input_nodes for t in tensors_in(value_of(arg))]
    return any(dtype.is_floating_point or dtype.is_complex for dtype in read)


def _narrow(node: fx.Node) -> torch.dtype | None:
    made = (tensor.dtype for tensor in tensors_in(value_of(node)))
    return next((dtype for dtype in made if dtype in WIDE), None)
