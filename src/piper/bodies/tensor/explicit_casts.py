"""Autocast as code: aten calls made under casts in, the same calls with `_to_copy` in front out.

Code that is traced before dispatch is traced before autocast, too: a result has the dtype that autocast
gives it, but no node of the code says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.casts import Casts, CastWatch
from piper.errors import TraceError

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.to.dtype)  # the user's own, and those of cached weights


def add_casts(graph: fx.Graph, casts: dict[fx.Node, Casts]) -> None:
    """`casts` has the autocasts around nodes; each node knows its fake value."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in casts or node.target in _CASTS:
            continue
        dtypes = _cast_arguments(node, casts[node])
        with graph.inserting_before(node):
            for arg, dtype in dtypes.items():
                cast = graph.call_function(aten._to_copy.default, (arg,), {"dtype": dtype})
                cast.meta = {**node.meta, "val": arg.meta["val"].to(dtype)}
                node.replace_input_with(arg, cast)
        if dtypes:
            _check_dtype(node)


def _cast_arguments(node: fx.Node, casts: Casts) -> dict[fx.Node, torch.dtype]:
    """The arguments that autocast casts, and to what."""
    values = {arg: arg.meta["val"] for arg in node.all_input_nodes}
    tensors = {arg: value for arg, value in values.items() if isinstance(value, Tensor)}
    with casts.active(), CastWatch(tensors.values()) as watch:
        _call(node)
    return {arg: dtype for arg, value in tensors.items() if (dtype := watch.cast_to(value))}


def _check_dtype(node: fx.Node) -> None:
    """A call that casts inside of itself has no form with casts in front."""
    now, then = _call(node), node.meta["val"]
    pair = (now, then) if isinstance(now, Tensor) else (now[0], then[0])
    if pair[0].dtype != pair[1].dtype:
        raise TraceError(
            f"{node.target} computes in several dtypes under autocast ({source_of(node)})",
            legal="lower(precision='bf16'), or casts by x.to(dtype)",
        )


def _call(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    mode = next(
        (v.fake_mode for a in node.all_input_nodes if hasattr(v := a.meta["val"], "fake_mode")),
        None,
    )
    if mode is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
