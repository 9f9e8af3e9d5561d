"""Rules of operators that take elements one by one."""

from __future__ import annotations

from torch import Tensor, fx

from piper.bodies.tensor.parts import dim_of, moved
from piper.bodies.tensor.rules.expert_rows import weighs_copies
from piper.bodies.tensor.rules.rule_table import (
    Answer,
    Ask,
    Emitter,
    aten,
    operator_name,
    rule,
    rule_of,
)
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Layout, Split

_OF_SUMS = ("clone", "contiguous", "neg", "alias")  # of a sum it is the sum of each


@rule("add", "sub")
def add(ask: Ask) -> Answer:
    sums = len(ask.args) == 2 and all(layout == PARTIAL for layout in ask.layouts)
    if sums:
        return Answer(ask.layouts, PARTIAL)
    if SHARED in ask.layouts:
        return _add_share(ask)
    return pointwise(ask)


def _add_share(ask: Ask) -> Answer:
    """To a partial sum each rank adds its share of what is the same on all."""
    node, index, share = ask.node, list(ask.layouts).index(SHARED), 1.0 / ask.size

    def added(to: Emitter, args: list[fx.Node]) -> fx.Node:
        own = [*args]
        own[index] = to.call(aten.mul.Tensor, args[index], share)
        return to.call(node.target, *own, *node.args[2:], **node.kwargs)  # type: ignore[arg-type]

    return Answer(ask.layouts, PARTIAL, added)


@rule("mul", "div")
def scale(ask: Ask) -> Answer:
    """A partial sum times a number, or a tensor that is one; or rows of which copies are then added."""
    if list(ask.layouts) == [PARTIAL] and ask.given.get("rounding_mode") is None:
        return Answer(ask.layouts, PARTIAL)
    if list(ask.layouts) == [PARTIAL, REPLICATED] and not ask.shape(1):
        return Answer(ask.layouts, PARTIAL)
    weighed = len(ask.args) == 2 and ask.layouts[0] == PARTIAL and ask.layouts[1] != PARTIAL
    if weighed and weighs_copies(ask.node):
        return Answer([PARTIAL, REPLICATED], PARTIAL)
    return pointwise(ask)


@rule(
    "pointwise", "_to_copy", "to", "type_as", "contiguous", "clone", "detach", "alias", "lift_fresh",
    "where", "masked_fill", "rsub", "__and__", "__or__", "silu", "gelu", "relu", "softplus", "mish",
    "zeros_like", "ones_like", "full_like", "empty_like",
)  # fmt: skip
def pointwise(ask: Ask) -> Answer:
    if list(ask.layouts) == [PARTIAL] and operator_name(ask.node) in _OF_SUMS:
        return Answer(ask.layouts, PARTIAL)
    layouts = ask.summed()
    result: Tensor = ask.made[0] if isinstance(ask.made, (tuple, list)) else ask.made
    chosen = _largest_split(ask, layouts, result.dim())
    if chosen is None:
        return Answer(layouts, ask.each(REPLICATED))
    dim = dim_of(chosen)
    wants: list[Layout] = []
    for index in range(len(ask.args)):
        shape = ask.shape(index)
        of_arg = dim - (result.dim() - len(shape))
        spread_over = of_arg < 0 or shape[of_arg] != result.shape[dim] or result.shape[dim] == 1
        wants.append(REPLICATED if spread_over else moved(chosen, of_arg))
    return Answer(wants, ask.each(chosen))


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the one result is made of those at its place."""
    known = rule_of(node) if node.op == "call_function" else None
    return known in (add, scale, pointwise) and isinstance(node.meta["val"], Tensor)


def _largest_split(ask: Ask, layouts: list[Layout], num_dims: int) -> Split | None:
    """The layout of the result: that of the largest argument that is split."""
    largest, chosen = -1, None
    for index, layout in enumerate(layouts):
        shape = ask.shape(index)
        if isinstance(layout, Split) and shape.numel() > largest:
            largest = shape.numel()
            chosen = moved(layout, dim_of(layout) + num_dims - len(shape))
    return chosen


@rule("new_empty", "new_zeros", "new_ones", "new_full")
def factory(ask: Ask) -> Answer:
    """Made of a dtype and a device alone; the shape in the call is that of the whole."""
    return Answer(ask.summed(), REPLICATED)
