"""Checkpoints: regions of captured code whose inside a backward makes again, as facts of their nodes.

A region is what torch.utils.checkpoint was called on. Nodes know their region and, where the user gave a
policy of what is saved all the same, its contexts. A trace of AOTAutograd hands the marks on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from piper.bodies.casts import CapturedRun

REGION = "piper_checkpoint"  # in the part of a node's meta that traces keep: the region's number
CONTEXTS = "piper_checkpoint_contexts"  # in a node's meta: what makes the contexts of a policy
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def region_of(node: fx.Node) -> int | None:
    found: int | None = (node.meta.get("custom") or {}).get(REGION)
    return found


def set_region(node: fx.Node, region: int, contexts: Callable[[], Any] | None) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), REGION: region}
    if contexts is not None:
        node.meta[CONTEXTS] = contexts


def is_saved_by_policy(node: fx.Node) -> bool:
    """Whether the user's policy said, when the node was traced, that its result is saved."""
    return node.meta.get("recompute") in _SAVED


class CheckpointedRun(CapturedRun):
    """Runs captured code; nodes that are traced from it keep the regions, and what policies say."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.policies: dict[int | None, Any] = {}
        marked = any(region_of(node) is not None for node in self.graph.nodes)
        with torch.fx.traceback.preserve_node_meta() if marked else contextlib.nullcontext():
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if CONTEXTS not in n.meta:
            return super().run_node(n)
        region = region_of(n)
        if region not in self.policies:  # a policy may count, per region
            self.policies[region], _ = n.meta[CONTEXTS]()
        with self.policies[region]:
            return super().run_node(n)


def region_words(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Regions as part of the identity of code, up to their numbers."""
    numbers: dict[int, int] = {}
    words = {}
    for node in nodes:
        region = region_of(node)
        if region is not None:
            number = numbers.setdefault(region, len(numbers))
            words[node] = f"again {number} {_identity(node.meta.get(CONTEXTS))}"
    return words


def _identity(contexts: Any) -> Any:
    """Layers each make a `partial` of their own, of the same functions."""
    if isinstance(contexts, partial):
        return _identity(contexts.func), *(id(arg) for arg in contexts.args)
    return id(contexts) if contexts is not None else ""
