"""Random operations: numbered in the uncut trace, and copied as pure functions of their keys."""

from __future__ import annotations

from urllib.parse import quote

import torch
from torch import fx

from piper.bodies.random.keyed import has_keyed_form, keyed
from piper.errors import TraceError
from piper.frontend.capture import Capture, callee, source_of


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
    return made


def first_place(nodes: list[fx.Node]) -> str:
    """What the user called and where, as one word: `dropout@model.py:12`."""
    return quote(f"{callee(nodes[0])}@{source_of(nodes[0])}", safe="@:/._-")


def uncut(capture: Capture) -> fx.GraphModule:
    """The whole step as captured; its inputs are those of the capture, then all keys."""
    index = random_indexes(capture)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in capture.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        copies[node] = graph.placeholder(node.name)
    keys = graph.placeholder("keys")
    for node in capture.graph.nodes:
        if node in index:
            copies[node] = copy_keyed(graph, node, copies, keys=keys, position=index[node])
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    root = torch.nn.Module()
    for name, constant in capture.constants.items():
        root.register_buffer(name, constant)
    return fx.GraphModule(root, graph)
