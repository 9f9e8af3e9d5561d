"""Regions: which tags each captured node has, after untagged code has joined a region."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx, nn

from piper.frontend.annotate import PREFIX, module_tags
from piper.ir.nodes import Tags

if TYPE_CHECKING:
    from piper.frontend.capture.capture import Capture


def is_code(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "get_attr")


def assign_regions(
    capture: Capture, *, stages: str, stage_of: Mapping[fx.Node, int] | None = None
) -> dict[fx.Node, Tags]:
    """The tags of every node of code; `free_code` says which nodes have no region.

    Code without a `stages` tag joins the stage of its latest tagged ancestor, else that of its first
    consumer, unless `stage_of` says it of all code. Other tags mark only the code inside them.
    """
    tags = {node: own_tags(node, capture.model) for node in capture.graph.nodes if is_code(node)}
    for node in tags:
        if node.target is operator.getitem:  # parts of a result stay with what made it
            tags[node] = tags.get(node.args[0], tags[node])
    if stage_of is None:
        stage_of = _join(capture, {n: t[stages] for n, t in tags.items() if stages in t})
    joined: dict[fx.Node, Tags] = {}
    for node, own in tags.items():
        inner = tuple((name, value) for name, value in own.items() if name != stages)
        stage = stage_of.get(node)
        joined[node] = ((stages, stage), *inner) if stage is not None else inner
    return joined


def free_code(capture: Capture) -> set[fx.Node]:
    """Untagged code that depends on neither batch nor parameters (masks, tables): every reader has
    its own. What is random is drawn once."""
    facts = capture.facts
    carried = {node for part in capture.state if part.carried for node in part.buffers}
    bound: set[int] = set()  # memory that other code changes
    while True:
        free: set[fx.Node] = set()
        for node in capture.graph.nodes:
            if node in capture.origins:
                if capture.origins[node].role == "buffer" and node not in carried:
                    free.add(node)
            elif (
                is_code(node)
                and node not in facts.random
                and not own_tags(node, capture.model)
                and not facts.memory[node] & bound
                and all(arg in free for arg in facts.inputs(node))
            ):
                free.add(node)
        changed = {
            m for n in capture.graph.nodes if n not in free for m in facts.changes.get(n, ())
        }
        if changed <= bound:
            return {node for node in free if is_code(node)}
        bound |= changed


def own_tags(node: fx.Node, model: nn.Module) -> dict[str, int]:
    """The tags that the user gave a node, by annotate or by tag."""
    custom = node.meta.get("custom") or {}
    own = {key.removeprefix(PREFIX): v for key, v in custom.items() if key.startswith(PREFIX)}
    paths = module_paths(node)
    for name, values in module_tags(model).items():
        for path in paths:
            if path in values:
                own.setdefault(name, values[path])
    return own


def module_paths(node: fx.Node) -> list[str]:
    """Names of the modules that a node lies in, inner ones last."""
    paths = []
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        _, found, rest = path.partition(".model")
        if found:
            paths.append(rest.lstrip(".").replace("['", ".").replace("']", ""))
    return paths


def _join(capture: Capture, tagged: dict[fx.Node, int]) -> dict[fx.Node, int]:
    graph, facts = capture.graph, capture.facts
    position = {node: index for index, node in enumerate(graph.nodes)}
    latest: dict[fx.Node, fx.Node] = {}  # node -> its latest tagged ancestor, or itself
    for node in graph.nodes:
        if node in tagged:
            latest[node] = node
        else:
            behind = [latest[arg] for arg in facts.inputs(node) if arg in latest]
            if behind:
                latest[node] = max(behind, key=position.__getitem__)
    stage = {node: tagged[found] for node, found in latest.items()}
    for node in reversed(graph.nodes):
        if node not in stage and is_code(node):
            users = (*node.users, *facts.seen_by.get(node, ()))
            ahead = [user for user in users if user in stage]
            if ahead:
                stage[node] = stage[min(ahead, key=position.__getitem__)]
    return stage
