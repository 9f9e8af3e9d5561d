"""Random operations: numbered in the uncut trace, and copied as pure functions of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from torch import fx

from piper.bodies.casts import CAST_WEIGHTS
from piper.bodies.random.keyed import has_keyed_form, keyed
from piper.errors import Source, TraceError
from piper.frontend.capture.capture import Capture, callee, source_of


def random_indexes(capture: Capture) -> dict[fx.Node, int]:
    """The random operations in trace order; raises where one cannot be keyed."""
    random = capture.facts.random
    found = {node: 0 for node in capture.graph.nodes if node in random}
    for node in found:
        for operator in random[node]:
            if not has_keyed_form(operator):
                raise TraceError(
                    f"{callee(node)} draws random numbers by {operator} ({source_of(node)}), which "
                    "has no form that gives the same numbers under every strategy",
                    legal="dropout, bernoulli, uniform, normal and exponential numbers, randint, "
                    "randperm, multinomial",
                )
    return {node: index for index, node in enumerate(found)}


def copy_keyed(
    graph: fx.Graph,
    node: fx.Node,
    copies: dict[fx.Node, fx.Node],
    *,
    keys: fx.Node,
    position: int,
) -> fx.Node:
    """A random node in another graph, where it draws from `keys[position]`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    made = graph.call_function(keyed(node.target, position), (keys, *args), kwargs)
    made.meta = dict(node.meta)
    if CAST_WEIGHTS in node.meta:  # by position, and the keys are in front
        made.meta[CAST_WEIGHTS] = {at + 1: dtype for at, dtype in node.meta[CAST_WEIGHTS].items()}
    return made


def first_place(nodes: list[fx.Node]) -> str:
    """What the user called and where, as one word: `dropout@model.py:12`."""
    return quote(f"{callee(nodes[0])}@{source_of(nodes[0])}", safe="@:/._-")


@dataclass(frozen=True)
class Draw:
    """One operator of the step that draws numbers: `index` of the key that it draws from, if anything
    depends on it, and `nth` among the draws from that key."""

    operator: Any
    index: int | None
    nth: int
    source: Source | None


def draws_of(capture: Capture) -> list[Draw]:
    """All draws in the order of the user's code, which is that of the trace."""
    index = random_indexes(capture)
    return [
        Draw(operator, index.get(node), nth, source_of(node))
        for node, operators in capture.facts.random.items()
        for nth, operator in enumerate(operators)
    ]
