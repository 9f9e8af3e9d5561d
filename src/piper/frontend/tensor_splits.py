"""Tensor splits: chunks in; how to cut each of their parameters, by their code, out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.bodies.tensor.infer import infer_splits
from piper.errors import Call
from piper.frontend.tensor_cut import refusing
from piper.frontend.traced import TracedChunk
from piper.ir.layouts import Split


def found_splits(
    chunks: Sequence[TracedChunk], size: int, call: Call | None = None
) -> dict[str, Split]:
    """Splits by parameter; those that stay whole are not named. A later chunk takes what the earlier
    ones have made of the parameters that they share."""
    found: dict[str, Split] = {}
    seen: set[str] = set()
    for chunk in chunks:
        with refusing(chunk, call):
            found |= infer_splits(
                chunk.code,
                chunk.inputs,
                size,
                given={name: found[name] for name in chunk.inputs if name in found},
                fixed=[name for name in chunk.inputs if name in seen and name not in found],
            )
        seen |= set(chunk.inputs)
    return found
