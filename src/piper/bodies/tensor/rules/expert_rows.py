"""Rules of experts: products of rows with a matrix per expert, and rows that are sorted and put back."""

from __future__ import annotations

from torch import fx

from piper.bodies.tensor.parts import dim_of, moved
from piper.bodies.tensor.rules.rule_table import Answer, Ask, operator_name, rule, tensor_args
from piper.ir.layouts import PARTIAL, REPLICATED, STACKED, Split

_TOGETHER = "rows of all ranks are sorted together"
_SAME_ROWS = ("view", "reshape", "_unsafe_view", "unflatten", "alias", "clone")


@rule("grouped_mm")
def grouped_mm(ask: Ask) -> Answer:
    """A matrix [E, k, n] per group of rows: by column (dim 2) or by row (dim 1); or a rank's own rows,
    of which it has the counts."""
    rows, weight, _ = ask.summed()
    if isinstance(rows, Split) and rows.order and rows.dim == 0 and not isinstance(weight, Split):
        return Answer([rows, REPLICATED, STACKED.sorted_as(rows.order)], rows)
    if isinstance(weight, Split) and weight.dim == 2:
        return Answer([REPLICATED, weight, REPLICATED], moved(weight, 1))
    if isinstance(weight, Split) and weight.dim == 1:
        return Answer([moved(weight, 1), weight, REPLICATED], PARTIAL)
    if isinstance(rows, Split) and rows.dim == 1:
        return ask.all_replicated("it contracts a split dim with matrices that are whole")
    return ask.all_replicated("its groups are not whole")


@rule("take_rows", "put_rows")
def moved_rows(ask: Ask) -> Answer:
    """Rows in another order: each is whole, or each rank has its part, or its term, of every one."""
    rows, order = ask.layouts
    if isinstance(order, Split) and order.order:
        whole = order.sorted_as(0)
        if operator_name(ask.node) == "put_rows":
            return Answer([order, order], whole)
        return Answer([_before_copies(whole, ask.given["copies"]), order], order)
    if rows == PARTIAL:
        return Answer([PARTIAL, REPLICATED], PARTIAL)
    if isinstance(rows, Split) and dim_of(rows) > 0:
        return Answer([rows, REPLICATED], rows)
    return ask.all_replicated(_TOGETHER)


@rule("sort_experts")
def sort_experts(ask: Ask) -> Answer:
    """Rows of all ranks, or each rank those that it has."""
    expert = ask.layouts[0]
    if ask.order and isinstance(expert, Split) and not expert.order:
        return Answer([expert], [expert.sorted_as(ask.order), STACKED.sorted_as(ask.order)])
    return ask.all_replicated(_TOGETHER)


def _before_copies(split: Split, copies: int) -> Split:
    """How rows lie of which each is there so many times."""
    if isinstance(split.blocks, int):
        return split
    return Split(split.dim, tuple(size // copies for size in split.blocks), mirrored=split.mirrored)


def copies_rows(node: fx.Node) -> bool:
    """Whether it makes several rows of each: gradients are fewer before it."""
    return operator_name(node) == "take_rows" and int(node.args[2]) > 1  # type: ignore[arg-type]


def weighs_copies(node: fx.Node) -> bool:
    """Whether it multiplies rows that were put back, of which copies are added up next."""
    rows, users = node.args[0], list(node.users)
    while isinstance(rows, fx.Node) and operator_name(rows) in _SAME_ROWS:
        rows = rows.args[0]
    put_back = isinstance(rows, fx.Node) and operator_name(rows) == "put_rows"
    return put_back and len(users) == 1 and operator_name(users[0]) == "sum"


def is_bias_of_rows(node: fx.Node) -> bool:
    """Whether it gives each row a vector of its expert's, times the one number that it multiplies."""
    return operator_name(node) == "grouped_mm" and tensor_args(node)[0].meta["val"].shape[1] == 1


def biases_last(graph: fx.Graph) -> None:
    """Biases of experts directly before they are added, when it is known to what."""
    for node in list(graph.nodes):
        if node.op == "call_function" and is_bias_of_rows(node) and len(node.users) == 1:
            (user,) = node.users
            if user.op == "call_function":
                user.prepend(node)
