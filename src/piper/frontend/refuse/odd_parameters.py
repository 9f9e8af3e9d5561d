"""Parameters that no plan can hold: those without a shape yet, and those with sparse gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from piper.errors import TraceError, user_source


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


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise for an embedding whose gradient would be a sparse tensor."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TraceError(
                f"{type(module).__name__} {path} has sparse gradients",
                legal="sparse=False: gradients are dense, and cut and reduced as such",
            )
