"""Rules of operators that need some dims whole, and take what lies along the others one by one."""

from __future__ import annotations

from collections.abc import Callable

from piper.bodies.tensor.parts import dim_of
from piper.bodies.tensor.rules.rule_table import (
    Answer,
    Ask,
    Rule,
    first_split,
    positive,
    rule,
    summed_to,
)
from piper.ir.layouts import REPLICATED, Layout, Split


def whole_along(dims_of: Callable[[Ask], list[int]]) -> Rule:
    """Of an operator of one tensor; more arguments, weights of norms, stay replicated."""

    def whole(ask: Ask) -> Answer:
        num_dims = len(ask.shape(0))
        dims = [positive(dim, num_dims) for dim in dims_of(ask)]
        layout, reason = ask.summed()[0], ""
        if isinstance(layout, Split) and layout.dim in dims:
            mark: Layout = summed_to(ask.args[0], ask.marks, ask.size)
            along_mark = isinstance(mark, Split) and mark.dim not in dims
            reason = f"it needs dim {layout.dim} whole"
            layout = mark if along_mark else REPLICATED
        others = [REPLICATED] * (len(ask.args) - 1)
        return Answer([layout, *others], ask.each(layout), None, reason)

    return whole


def _one_dim(ask: Ask) -> list[int]:
    return [ask.given.get("dim", -1)]


def _normalized(ask: Ask) -> list[int]:
    num_dims = len(ask.shape(0))
    return list(range(num_dims - len(ask.given["normalized_shape"]), num_dims))


rule(
    "softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "topk", "sort",
    "argsort",
)(whole_along(_one_dim))  # fmt: skip
rule("layer_norm", "rms_norm")(whole_along(_normalized))


@rule("gather", "scatter", "scatter_add")
def indexed(ask: Ask) -> Answer:
    """Index by index along one dim; along another, all arguments must be equally long."""
    along = positive(ask.given["dim"], len(ask.made.shape))
    layout = first_split(ask.summed())
    if layout is None:
        return ask.all_replicated()
    dim = dim_of(layout)
    if dim == along:
        return ask.all_replicated("its indexes go along the split dim")
    if any(ask.shape(i)[dim] != ask.made.shape[dim] for i in range(len(ask.args))):
        return ask.all_replicated("its arguments differ in length along the split dim")
    return Answer([layout] * len(ask.args), layout)


@rule("index_select")
def index_select(ask: Ask) -> Answer:
    layout = ask.summed()[0]
    along = positive(ask.given["dim"], len(ask.made.shape))
    if not isinstance(layout, Split) or layout.dim == along:
        return ask.all_replicated("its indexes go along the split dim")
    return Answer([layout, REPLICATED], layout)
