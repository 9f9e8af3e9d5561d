"""Operator dtypes: a captured call in; the rule by which it takes its floating-point inputs out.

The lists are those of torch's autocast on CUDA (ATen/autocast_mode.h), on every device alike, with the
functions around those operators that a capture sees whole. A name stands for the function, the builtin
and the tensor's method.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from piper.bodies.captured_nodes import callee, value_of
from piper.bodies.closed_operator import ClosedOperator


class Rule(Enum):
    """The dtype in which an operator takes its floating-point inputs."""

    FLOAT32 = "float32, unless its caller names a dtype"
    NARROW = "the dtype that the model computes in"
    EQUAL = "the widest of them"
    TARGET = "that of the tensor which it changes in place"
    TRACED = "those that it was traced with"
    SUM = "promoted, but a branch is added to a narrow residual stream in the stream's"


FLOAT32 = {
    "acos", "arccos", "arcsin", "asin", "cosh", "cumprod", "cumsum", "erfinv", "exp", "expm1", "log",
    "log10", "log1p", "log2", "logsumexp", "pow", "prod", "reciprocal", "rsqrt", "sinh", "softplus",
    "sum", "tan",
    "gumbel_softmax", "log_softmax", "softmax", "softmin",
    "group_norm", "layer_norm", "local_response_norm", "native_group_norm", "native_layer_norm",
    "normalize", "rms_norm",
    "cdist", "cosine_similarity", "dist", "frobenius_norm", "linalg_matrix_norm", "linalg_norm",
    "linalg_vector_norm", "norm", "nuclear_norm", "pairwise_distance", "pdist", "renorm",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "cross_entropy", "cross_entropy_loss", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "nll_loss2d", "nll_loss_nd",
    "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "interpolate", "upsample", "upsample_bicubic2d", "upsample_bilinear", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_trilinear3d",
}  # fmt: skip

NARROW = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_matmul",
    "linalg_multi_dot", "linalg_vecdot", "linear", "linear_cross_entropy", "matmul", "mm", "mv",
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu",
    "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell",
    "multi_head_attention_forward", "scaled_dot_product_attention",
    "_grouped_mm", "grouped_mm",
}  # fmt: skip

# Operators that refuse inputs of several dtypes, instead of promoting them.
_EQUAL = {
    "addcdiv", "addcmul", "allclose", "atan2", "bilinear", "cartesian_prod", "complex", "cross", "dot",
    "grid_sample", "grid_sampler", "heaviside", "index_add", "index_copy", "index_put", "index_reduce",
    "inner", "isclose", "lerp", "linalg_cross", "linalg_solve", "masked_scatter", "meshgrid", "polar",
    "put", "scatter", "scatter_add", "scatter_reduce", "tensordot", "vdot",
}  # fmt: skip

# Operators that move elements as they are. A cast before them gives what a cast behind them gives; their
# gradients are moved back, and only rows that were chosen repeatedly are added up.
_MOVING = {
    "cat", "clone", "concat", "concatenate", "contiguous", "flatten", "flip", "index_select",
    "moveaxis", "movedim", "permute", "reshape", "reshape_as", "roll", "squeeze", "stack", "swapaxes",
    "swapdims", "t", "take_rows", "transpose", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip

_TRACED = {"batch_norm", "embedding_bag", "instance_norm"}
_OPERATORS = {  # of Python, by the names that tensors have for them
    "__getitem__": "getitem",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__rdiv__": "reciprocal",
    "__rmatmul__": "matmul",
    "__rpow__": "pow",
    "__rtruediv__": "reciprocal",
    "__setitem__": "setitem",
}


def rule_of(node: fx.Node) -> Rule | None:
    """Without one, a call follows torch's type promotion."""
    if _is_foreign(node.target):
        return Rule.TRACED if not _may_change(node.target) else None
    if isinstance(node.kwargs.get("out"), fx.Node):
        return None
    name = operator_name(callee(node))
    if name == "truediv" and not isinstance(_value(node.args[0]), torch.Tensor):
        name = "reciprocal"  # 1 / x
    rule = rule_of_name(name)
    if rule is Rule.FLOAT32 and names_dtype(node.args, node.kwargs):
        return None
    if name == "view" and names_dtype(node.args, node.kwargs):  # which says how bits are read
        return Rule.TRACED
    return rule


def rule_of_name(name: str) -> Rule | None:
    if name == "setitem" or (name.endswith("_") and name[:-1] in NARROW | _EQUAL):
        return Rule.TARGET
    names = {
        Rule.FLOAT32: FLOAT32,
        Rule.NARROW: NARROW,
        Rule.EQUAL: _EQUAL,
        Rule.TRACED: _TRACED,
        Rule.SUM: {"add"},
    }
    return next((rule for rule, known in names.items() if name in known), None)


def moves(node: fx.Node) -> bool:
    """Whether it only moves elements."""
    if _is_foreign(node.target) or rule_of(node) is not None or "out" in node.kwargs:
        return False
    tensors = [isinstance(value_of(arg), torch.Tensor) for arg in node.all_input_nodes]
    return moves_by_name(operator_name(callee(node)), num_tensors=sum(tensors))


def moves_by_name(name: str, *, num_tensors: int) -> bool:
    """A slice has fewer elements to cast than what it is taken from. Rows that a tensor names move."""
    return name in _MOVING or (name == "getitem" and num_tensors > 1)


def operator_name(name: str) -> str:
    """One name for all spellings of an operator."""
    plain = name.partition(".")[0].removeprefix("special_")
    return _OPERATORS.get(plain, plain)


def names_dtype(*arguments: Any) -> bool:
    found = []
    fx.node.map_aggregate(arguments, lambda a: found.append(isinstance(a, torch.dtype)))
    return any(found)


def _value(argument: Any) -> Any:
    return value_of(argument) if isinstance(argument, fx.Node) else argument


def _is_foreign(target: Any) -> bool:
    """Whether it is no operator of torch, nor one of ours that is as one of torch's."""
    if isinstance(target, str):
        return False
    if isinstance(target, ClosedOperator | HigherOrderOperator):
        return True
    if isinstance(target, OpOverload | OpOverloadPacket):
        namespace, name = str(target).partition(".")[0], _name(target)
        ours = name in NARROW or (namespace, name) == ("piper", "take_rows")
        return namespace not in ("aten", "prim", "prims") and not ours
    home = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
    return home not in ("torch", "_operator", "builtins", "math")


def _name(target: Any) -> str:
    return str(target.__name__).partition(".")[0]


def _may_change(target: Any) -> bool:
    """Whether it may change what it is given, which a cast would hide."""
    return isinstance(target, OpOverload) and target._schema.is_mutable
