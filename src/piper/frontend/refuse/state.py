"""State: what a captured step changes of what it is given is refused, but for buffers in training."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from torch import fx, nn

from piper.bodies.captured_nodes import source_of
from piper.errors import TraceError
from piper.frontend.capture.interpret import Facts
from piper.frontend.refuse.ways_out import NO_DEVICE, by_line

BUFFERS = "buffers that a training forward alone changes: nothing that eval() mode changes too"
PARAMETERS = "make_model makes parameters and ties them; the optimizer alone changes them"
_LEGAL = {
    "param": PARAMETERS,
    "buffer": BUFFERS,
    "batch": "write the result to a new tensor: x = x + y instead of x += y",
}
_WORDS = {"param": "parameter ", "buffer": "buffer ", "batch": ""}


@dataclass(frozen=True)
class Origin:
    """Where a placeholder of the captured graph comes from."""

    role: str  # param, buffer or batch
    name: str


def refuse_changed_state(
    origins: Mapping[fx.Node, Origin],
    facts: Facts,
    model: nn.Module,
    *,
    kept: Collection[fx.Node] = (),
) -> None:
    """Raise at the first node that changes a parameter, the batch or a buffer that is not `kept`,
    whoever reads it then: nothing else that is changed lasts until the next step, and dead code, which
    is what a change looks like that nobody reads, is removed.
    """
    given = {m: origins[node] for node in origins if node not in kept for m in facts.memory[node]}
    for node, changes in facts.changes.items():
        for origin in sorted((given[m] for m in changes if m in given), key=lambda o: o.name):
            source = source_of(node)
            line = linecache.getline(source.file, source.line) if source else ""
            moved = origin.role == "param" and by_line(line).legal == NO_DEVICE
            raise TraceError(
                f"{_described(origin, model)} is changed in place ({source})",
                legal=NO_DEVICE if moved else _LEGAL[origin.role],
            )


def _described(origin: Origin, model: nn.Module) -> str:
    """`buffer norm.running_mean of BatchNorm1d norm`: a module's own state is not the user's code."""
    text = f"{_WORDS[origin.role]}{origin.name}"
    owner, _, _ = unquote(origin.name).rpartition(".")
    if origin.role == "batch" or not owner:
        return text
    return f"{text} of {type(model.get_submodule(owner)).__name__} {owner}"
