"""Flex attention: calls of the operator in, calls of plain math without the blocks of masks out.

Torch finds the blocks of a mask by torch.vmap, which no plan runs. In traced code an operator stands for
what it would find, and nothing may read that operator's result but flex attention, for its blocks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from piper.bodies import flex_math
from piper.bodies.captured_nodes import callee, source_of
from piper.bodies.closed_operator import targets_in
from piper.errors import TraceError

_library = torch.library.Library("piper", "FRAGMENT")
_library.define("unknown_mask(SymInt[] shape, Device device, ScalarType dtype) -> Tensor")


def _some_mask(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


_library.impl("unknown_mask", _some_mask, "CompositeExplicitAutograd")


@contextlib.contextmanager
def unknown_blocks() -> Iterator[None]:
    """While Dynamo traces: masks that are made in traced code have blocks that nobody computes."""
    module: Any = sys.modules.get(flex_math.MODULE)
    if module is None:
        yield
        return
    with (
        patch.object(module, "create_mask", _create_mask),
        patch.object(module, "_ordered_to_dense", _ordered_to_dense),
    ):
        yield


def _create_mask(
    mod_fn: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = "cpu"
) -> Tensor:
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    return torch.ops.piper.unknown_mask(shape, torch.device(device), torch.bool)


def _ordered_to_dense(
    num_blocks_in_row: Tensor, col_indices: Tensor, num_cols: int | None = None
) -> Tensor:
    """Torch before 2.12 gives no number of columns."""
    shape = (*num_blocks_in_row.shape, num_cols or col_indices.shape[-1])
    return torch.ops.piper.unknown_mask(shape, num_blocks_in_row.device, torch.int32)


def lower_flex_attention(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs without those that only said which blocks a kernel may skip."""
    placeholders = graph.find_nodes(op="placeholder")
    blocks: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and callee(node) == "flex_attention":
            *sizes, mask = node.args[4]
            blocks |= {arg for arg in sizes if isinstance(arg, fx.Node)}
            node.target = flex_math.flex_attention
            sizes = [None if arg in blocks else arg for arg in sizes]
            node.args = (*node.args[:4], (*sizes, mask), *node.args[5:])
    unread = {node for node in blocks if node.op == "placeholder" and not node.users}
    for node in unread:
        graph.erase_node(node)
    return [v for node, v in zip(placeholders, inputs, strict=True) if node not in unread]


def refuse_unknown_masks(graphs: Iterable[fx.Graph]) -> None:
    """Raise if code that is left when all dead code is gone reads an unknown mask."""
    for node in (node for graph in graphs for node in graph.nodes):
        if torch.ops.piper.unknown_mask in targets_in(node):
            raise TraceError(
                f"the step makes a mask by torch.vmap ({source_of(node)})",
                legal="create_block_mask for flex_attention, or comparisons of index tensors: "
                "i[:, None] >= i[None, :]",
            )
