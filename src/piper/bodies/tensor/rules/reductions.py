"""Rules of operators that reduce dims."""

from __future__ import annotations

from torch import fx

from piper.bodies.tensor.parts import dim_of, moved
from piper.bodies.tensor.rules.pointwise import pointwise
from piper.bodies.tensor.rules.rule_table import (
    Answer,
    Ask,
    Emitter,
    aten,
    operator_name,
    positive,
    rule,
)
from piper.ir.layouts import PARTIAL, Split


@rule("sum", "mean")
def sum_(ask: Ask) -> Answer:
    layout, dims = ask.layouts[0], _dims(ask)
    if layout == PARTIAL:
        return Answer([PARTIAL], PARTIAL)
    if not isinstance(layout, Split) or layout.dim not in dims:
        return _kept(ask)
    if operator_name(ask.node) == "sum":
        return Answer([layout], PARTIAL)
    node, share = ask.node, 1.0 / ask.size

    def mean(to: Emitter, args: list[fx.Node]) -> fx.Node:
        """Parts are equally long, so that the mean is the mean of theirs."""
        own = to.call(node.target, args[0], *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
        return to.call(aten.mul.Tensor, own, share)

    return Answer([layout], PARTIAL, mean)


@rule("amax", "amin", "logsumexp", "argmax", "argmin", "any", "all", "var", "std")
def other_reduction(ask: Ask) -> Answer:
    layout = ask.summed()[0]
    if isinstance(layout, Split) and layout.dim in _dims(ask):
        return ask.all_replicated(f"it needs dim {layout.dim} whole")
    return _kept(ask)


@rule("max", "min")
def max_(ask: Ask) -> Answer:
    return pointwise(ask) if "other" in ask.given else other_reduction(ask)


def _dims(ask: Ask) -> list[int]:
    dims, num_dims = ask.given.get("dim"), len(ask.shape(0))
    if dims is None or dims == []:
        return list(range(num_dims))
    return [positive(dim, num_dims) for dim in ([dims] if isinstance(dims, int) else dims)]


def _kept(ask: Ask) -> Answer:
    """The split dim, if there is one, is not reduced."""
    layout = ask.summed()[0]
    if not isinstance(layout, Split):
        return Answer([layout], ask.each(layout))
    dim = dim_of(layout)
    if not ask.given.get("keepdim"):
        dim -= sum(other < dim for other in _dims(ask))
    return Answer([layout], ask.each(moved(layout, dim)))
