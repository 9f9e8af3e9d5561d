"""A node of a captured graph in; what it made, what it called and the user's line out."""

from __future__ import annotations

import os
from typing import Any

from torch import fx

from piper.errors import Source

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OF_STATE = "piper_of_state"  # in a node's meta: only the state of buffers needs it
OF_DTYPE = (
    "piper_of_dtype"  # in a node's meta: it stands only where the model computes in some dtype
)


def value_of(node: fx.Node) -> Any:
    """The fake result of a captured node."""
    return node.meta.get("example_value", node.meta.get("val"))


def plain_code(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of code that a model has in each mode and each dtype alike: not those that only the
    state of buffers needs, nor casts for one dtype."""
    return [node for node in graph.nodes if _is_plain(node)]


def numbered(graph: fx.Graph) -> dict[fx.Node, int]:
    """Per node, how many nodes of plain code come before it."""
    numbers, plain = {}, 0
    for node in graph.nodes:
        numbers[node] = plain
        plain += _is_plain(node)
    return numbers


def _is_plain(node: fx.Node) -> bool:
    code = node.op in ("call_function", "call_method", "get_attr")
    return code and not node.meta.get(OF_STATE) and not node.meta.get(OF_DTYPE)


def callee(node: fx.Node) -> str:
    """What the user's code called."""
    return str(getattr(node.target, "__name__", node.target))


def source_of(node: fx.Node) -> Source | None:
    """The user's line that made a node."""
    for line in reversed((node.meta.get("stack_trace") or node.stack_trace or "").splitlines()):
        line = line.strip()
        if line.startswith('File "') and "/torch/" not in line:
            file, _, rest = line[len('File "') :].partition('", line ')
            if file.startswith(_OURS + os.sep):
                continue
            return Source(file, int(rest.split(",")[0]))
    return None
