"""A node of a captured graph in; what it made, what it called and the user's line out."""

from __future__ import annotations

from typing import Any

from torch import fx

from piper.errors import Source


def value_of(node: fx.Node) -> Any:
    """The fake result of a captured node."""
    return node.meta.get("example_value", node.meta.get("val"))


def callee(node: fx.Node) -> str:
    """What the user's code called."""
    return str(getattr(node.target, "__name__", node.target))


def source_of(node: fx.Node) -> Source | None:
    """The user's line that made a node."""
    for line in reversed((node.meta.get("stack_trace") or node.stack_trace or "").splitlines()):
        line = line.strip()
        if line.startswith('File "') and "/torch/" not in line:
            file, _, rest = line[len('File "') :].partition('", line ')
            return Source(file, int(rest.split(",")[0]))
    return None
