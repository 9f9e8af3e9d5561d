"""Recurrent layers with dropout between them, as AOTAutograd sees them.

Torch's own decomposition (2.11 and 2.13) forgets the dropout: it sets the rate to 0 at the first layer.
This can go when torch's no longer does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """While a body is traced."""
    from torch._decomp import decompositions

    original = decompositions._rnn_helper

    def layers(
        input: Any,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[Any, list[Any]]:
        """Each layer by itself, on time-major input, as the kernels draw their dropout."""
        input = input.transpose(0, 1) if batch_first else input
        width = 2 if bidirectional else 1
        last: list[Any] = []
        for index in range(num_layers):
            own = slice(index * width, (index + 1) * width)
            if index and dropout:
                input = torch.dropout(input, dropout, train)
            input, finals = original(
                input, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )  # fmt: skip
            last += finals
        return (input.transpose(0, 1) if batch_first else input), last

    with patch.object(decompositions, "_rnn_helper", layers):
        yield
