"""Batch layouts: a program and its types at another size in; how each Value lies along the batch out."""

from __future__ import annotations

from collections.abc import Mapping

from piper.frontend.traced import Traced, TracedValue
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, STACKED, Layout, Split
from piper.ir.tensor_type import TensorType
from piper.ir.values import RESULTS


def batch_layouts(traced: Traced, other: Mapping[str, TensorType] | None) -> dict[str, Layout]:
    """Per traced Value, its layout along data ranks and microbatches.

    Rows lie along the dim that grows with the batch. Without the types at another size, `other`, that
    is the dim 0 that is a multiple of the batch: lowering finds out where that is wrong.
    """
    twins: Mapping[str, TensorType] = other or {}
    rows = next(v.spec.shape[0] for v in traced.values.values() if v.role == "batch")
    layouts = {}
    for name, value in traced.values.items():
        layouts[name] = _fixed(value)
        if layouts[name] is STACKED and value.role in ("activation", "prediction"):
            twin = twins.get(name)
            layouts[name] = _grown(value.spec, twin) if twin else _guessed(value.spec, rows)
    return layouts


def _fixed(value: TracedValue) -> Layout:
    """The layout of a Value that has no rows, and STACKED where that is to be seen."""
    if value.role in ("param", "buffer"):
        return REPLICATED
    if value.role in RESULTS:
        return PARTIAL
    if value.role == "batch":
        return Split(0)
    return STACKED if value.batched else SHARED


def _grown(spec: TensorType, other: TensorType) -> Layout:
    pairs = zip(spec.shape, other.shape, strict=True)
    grown = [dim for dim, (one, two) in enumerate(pairs) if one != two]
    return Split(grown[0]) if len(grown) == 1 else STACKED


def _guessed(spec: TensorType, rows: int) -> Layout:
    return Split(0) if spec.shape and spec.shape[0] % rows == 0 else STACKED
