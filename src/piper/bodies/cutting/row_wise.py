"""Row-wise code: whether a sharded region treats every row, and every expert, alone.

Only then do rows and experts compute the same on whichever rank they meet. What is not known to be
row-wise is refused: a wrong gradient would be silent.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor, fx

from piper.bodies.cutting.partition import Half, is_view
from piper.bodies.leaves import tensors_in
from piper.errors import TraceError

Kind = Literal["rows", "experts", "counts"]

# Products of rows with their group's matrix, and our own regrouping around the region.
_GROUPED = {"grouped_mm", "_grouped_mm", "put_rows", "take_rows"}
# Operators that work along dims that they are told, or row by row.
_ALONG = {
    "_softmax", "_log_softmax", "sum", "mean", "amax", "amin", "max", "min", "cumsum", "sort", "topk",
    "var", "std", "var_mean", "logsumexp", "argmax", "argmin", "cat", "split", "split_with_sizes",
    "unbind", "select", "slice", "unsqueeze", "squeeze", "transpose", "permute", "expand", "view",
    "reshape", "_unsafe_view", "clone", "_to_copy", "native_layer_norm", "_fused_rms_norm", "detach",
    "alias", "zeros_like", "ones_like", "full_like", "constant_pad_nd", "flip", "glu",
}  # fmt: skip
_END = 2**62  # a slice up to here is the whole


def refuse_mixed_rows(forward: Half, *, counts: int, rows: tuple[int, ...]) -> None:
    """Raise at the first operator that could let one row, or expert, see another."""
    kinds: dict[fx.Node, Kind] = {}
    inputs = iter(forward.inputs)
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            index = next(inputs).index
            kinds[node] = "counts" if index == counts else "rows" if index in rows else "experts"
        elif node.op == "call_function" and tensors_in(node.meta.get("val")):
            found = {kinds[arg] for arg in node.all_input_nodes if arg in kinds}
            if found:
                kinds[node] = _kind(node, found)


def _kind(node: fx.Node, found: set[Kind]) -> Kind:
    if node.target is operator.getitem:
        return next(iter(found))
    name = _name(node)
    if "rows" in found:
        if name not in _GROUPED and (found != {"rows"} or not _is_row_wise(node, name)):
            _refuse(name, "rows")
        return "rows"
    if "experts" in found:
        if found != {"experts"} or not _keeps_experts(node, name):
            _refuse(name, "experts")
        return "experts"
    if any(t.is_floating_point() for t in tensors_in(node.meta["val"])):
        _refuse(name, "counts with values")
    return "counts"


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).split(".")[-1]


def _is_row_wise(node: fx.Node, name: str) -> bool:
    if not _is_pointwise(node) and name not in _ALONG:
        return False
    results = tensors_in(node.meta["val"])
    return all(_rows_first(t) for t in results) and not _works_along_first(node)


def _keeps_experts(node: fx.Node, name: str) -> bool:
    """Whether an operator on parameters alone leaves each expert's part its own."""
    if not (_is_pointwise(node) or is_view(node) or name in _ALONG):
        return False
    first = {
        _value(arg).shape[0] for arg in node.all_input_nodes if isinstance(_value(arg), Tensor)
    }
    return not _works_along_first(node) and all(
        t.dim() > 0 and {t.shape[0]} == first for t in tensors_in(node.meta["val"])
    )


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _rows_first(tensor: Tensor) -> bool:
    symbolic = [not isinstance(size, int) for size in tensor.shape]
    return bool(symbolic) and symbolic[0] and not any(symbolic[1:])


def _works_along_first(node: fx.Node) -> bool:
    """Whether an operator was told to work along dim 0."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    names = [argument.name for argument in schema.arguments]
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if _name(node) == "slice" and given.get("start") in (0, None):
        end = given.get("end")
        if end is None or (isinstance(end, int) and end >= _END):
            return False
    if _name(node) == "permute":
        return next(iter(given["dims"])) != 0
    if _name(node) == "t":
        return True
    told = given.get("dim", given.get("dims", [given[n] for n in ("dim0", "dim1") if n in given]))
    dims = told if isinstance(told, list | tuple) else [] if told is None else [told]
    rank = max(t.dim() for arg in node.all_input_nodes for t in tensors_in(_value(arg)))
    return any(isinstance(dim, int) and dim in (0, -rank) for dim in dims)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _refuse(name: str, what: str) -> None:
    raise TraceError(
        f"the sharded region mixes {what}: {name}",
        legal="inside the region every row, and every expert, is treated alone; counts only say how "
        "many rows each expert has",
    )
