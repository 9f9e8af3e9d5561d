"""Parameters that no plan can hold: those without a shape yet, and those with sparse gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import fx
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from piper.bodies.captured_nodes import callee, source_of
from piper.errors import TraceError, user_source

_SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7}  # which of their arguments asks for it


@contextlib.contextmanager
def refusing_lazy() -> Iterator[None]:
    """While a model is built: a lazy module is refused with the line that makes it."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> None:
        raise TraceError(
            f"make_model makes a lazy module ({user_source()}), whose parameters have no shape yet",
            legal="sizes that are written down: nn.Linear(in_features, out_features)",
        )

    with (
        patch.object(UninitializedParameter, "__new__", refuse),
        patch.object(UninitializedBuffer, "__new__", refuse),
    ):
        yield


def refuse_sparse_gradients(graph: fx.Graph) -> None:
    """Raise for an embedding whose gradient would be a sparse tensor."""
    for node in graph.nodes:
        if node.target in _SPARSE_AT and _argument(node, _SPARSE_AT[node.target]):
            raise TraceError(
                f"{callee(node)} has sparse gradients ({source_of(node)})",
                legal="sparse=False: gradients are dense, and cut and reduced as such",
            )


def _argument(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("sparse")
