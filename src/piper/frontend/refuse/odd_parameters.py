"""Parameters that no plan can hold: those without a shape yet, and those with sparse gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from piper.bodies.captured_nodes import callee, source_of
from piper.errors import TraceError, user_source

_SPARSE = ("sparse", "sparse_grad")  # arguments that ask for it
# Which argument that is, where it may come without its name.
_SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 5}


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
    """Raise for a call whose gradient would be a sparse tensor."""
    for node in graph.nodes:
        asked = [name for name in _SPARSE if node.kwargs.get(name)]
        if node.target in _SPARSE_AT and any(node.args[_SPARSE_AT[node.target] :][:1]):
            asked = ["sparse"]
        if asked:
            raise TraceError(
                f"{callee(node)} has sparse gradients ({source_of(node)})",
                legal=f"{asked[0]}=False: gradients are dense, and cut and reduced as such",
            )
