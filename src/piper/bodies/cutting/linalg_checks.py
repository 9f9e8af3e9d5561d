"""Checks of torch.linalg, which raise for a matrix without the result: NaN where they would.

torch 2.13 keeps their order by a token that goes through forward and backward, and no body has room for
one; on a GPU each would wait for the device. Without them a failed Cholesky is finite numbers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._higher_order_ops import effects
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import node as fx_node

_aten = torch.ops.aten
_CHECK = _aten._linalg_check_errors.default


@contextlib.contextmanager
def unordered_checks() -> Iterator[None]:
    """While code is traced: checks are plain calls, which dead code elimination leaves."""
    kept = fx_node._side_effectful_functions | {_CHECK}
    with patch.object(fx_node, "_side_effectful_functions", kept), _without_tokens():
        yield


@contextlib.contextmanager
def _without_tokens() -> Iterator[None]:
    original = getattr(effects, "_get_effect", None)
    if original is None:  # torch 2.11, where the check has no order
        yield
        return

    def effect_of(call: Any) -> Any:
        return None if call is _CHECK else original(call)

    with patch.object(effects, "_get_effect", effect_of):
        yield


def nan_where_checks_fail(graph: fx.Graph) -> None:
    """Exchange checks for NaN in the results that they are about."""
    for check in graph.find_nodes(op="call_function", target=_CHECK):
        info = check.args[0]
        graph.erase_node(check)
        if info.target is not operator.getitem:
            continue  # a check of the user's own, of no call's results
        made = info.args[0]  # what one call has made: results, and their info
        made.append(info)
        for result in [node for node in made.users if node is not info]:
            value: Tensor = result.meta["val"]
            if value.is_floating_point() or value.is_complex():
                _fill(graph, result, info)


def _fill(graph: fx.Graph, result: fx.Node, info: fx.Node) -> None:
    readers = list(result.users)
    with graph.inserting_before(result.next):
        failed = _call(graph, _aten.ne.Scalar, info, 0)
        for _ in range(result.meta["val"].dim() - info.meta["val"].dim()):
            failed = _call(graph, _aten.unsqueeze.default, failed, -1)
        filled = _call(graph, _aten.masked_fill.Scalar, result, failed, float("nan"))
    for reader in readers:
        reader.replace_input_with(result, filled)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    first: Tensor = made.all_input_nodes[0].meta["val"]
    with first.fake_mode if isinstance(first, FakeTensor) else contextlib.nullcontext():
        made.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
    return made
