"""layer_starts: the code of a chunk in; the places out between which it is computed again as a whole.

Code that is cut over ranks cannot run again inside of one backward body: communication lies between
its pieces. Each checkpointed call, or each layer, gets a chunk of its own, of which inputs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from piper.bodies.checkpoint_regions import region_of
from piper.frontend.cut.units import module_levels

_Label = str | int | None


def call_starts(nodes: Sequence[fx.Node]) -> set[int]:
    """Where checkpointed calls begin, and the code behind them."""
    return _changes([-1 if (region := region_of(n)) is None else region for n in nodes])


def layer_starts(nodes: Sequence[fx.Node]) -> set[int]:
    """Where layers begin, the entries of the outermost list of modules that the code runs through, and
    other modules before and behind them. What lies in no module goes with the code before it."""
    levels = [module_levels(node) for node in nodes]
    numbered = [[path for path in each if path.rpartition(".")[2].isdigit()] for each in levels]
    for depth in range(max(map(len, numbered), default=0)):
        layers = {each[depth] for each in numbered if len(each) > depth}
        around = {path for layer in layers for path in _around(layer)}
        labels: list[_Label] = []
        for paths, inside in zip(levels, numbered, strict=True):
            if len(inside) > depth:
                labels.append(inside[depth])
            else:
                labels.append(None if not paths or paths[-1] in around else "")
        starts = _changes(labels)
        if starts:
            return starts
    return set()


def _around(path: str) -> list[str]:
    """The modules that a module lies in."""
    words = path.split(".")
    return [".".join(words[:end]) for end in range(1, len(words))]


def _changes(labels: Sequence[_Label]) -> set[int]:
    """Where a label follows another one."""
    starts: set[int] = set()
    last: _Label = None
    for position, label in enumerate(labels):
        if label is not None and label != last:
            if last is not None:
                starts.add(position)
            last = label
    return starts
