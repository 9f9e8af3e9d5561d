"""Rules of matrix products and tables."""

from __future__ import annotations

from torch import fx

from piper.bodies.tensor.parts import dim_of, moved
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, aten, rule
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split


@rule("linear")
def linear(ask: Ask) -> Answer:
    """By column (dim 0 of the weight), by row (dim 1), or row by row of the input."""
    x, weight, *_ = ask.summed()
    biases = len(ask.args) - 2
    last = len(ask.shape(0)) - 1
    if not isinstance(weight, Split):
        if isinstance(x, Split) and x.dim == last:
            return ask.all_replicated("it contracts a split dim with a matrix that is whole")
        return Answer([x, REPLICATED, *[REPLICATED] * biases], x)
    if weight.dim == 0:
        bias = moved(weight, 0)
        return Answer(
            [REPLICATED, weight, *[bias] * biases], moved(weight, len(ask.made.shape) - 1)
        )
    if biases:
        return ask.all_replicated("its bias would be added once per rank")
    return Answer([moved(weight, last), weight], PARTIAL)


@rule("matmul", "mm", "bmm")
def matmul(ask: Ask) -> Answer:
    dims = [len(ask.shape(0)), len(ask.shape(1))]
    num_dims = len(ask.made.shape)
    one, two = ask.summed()
    if min(dims) == 1:
        return ask.all_replicated("it is a product with a vector")
    inner = dims[0] - 1, dims[1] - 2
    if isinstance(two, Split) and ask.args[1] in ask.weights:  # which never move
        if two.dim == dims[1] - 1:
            return Answer([REPLICATED, two], moved(two, num_dims - 1))
        if two.dim == inner[1]:
            return Answer([moved(two, inner[0]), two], PARTIAL)
    if isinstance(one, Split) and one.dim == dims[0] - 2:
        return Answer([one, REPLICATED], moved(one, num_dims - 2))
    contracted = [
        layout
        for layout, dim in zip((one, two), inner, strict=True)
        if isinstance(layout, Split) and layout.dim == dim
    ]
    if contracted:
        if sum(isinstance(layout, Split) for layout in (one, two)) > len(contracted):
            return ask.all_replicated("its arguments are split along different dims")
        return Answer([moved(contracted[0], dim) for dim in inner], PARTIAL)
    if isinstance(two, Split) and two.dim == dims[1] - 1 and not isinstance(one, Split):
        return Answer([REPLICATED, two], moved(two, num_dims - 1))
    return _by_batch_dim(ask, one, two)


def _by_batch_dim(ask: Ask, one: Layout, two: Layout) -> Answer:
    num_dims = len(ask.made.shape)
    split, index = (one, 0) if isinstance(one, Split) else (two, 1)
    if not isinstance(split, Split):
        return Answer([REPLICATED, REPLICATED], REPLICATED)
    dim = dim_of(split) + num_dims - len(ask.shape(index))
    if dim >= num_dims - 2:
        return ask.all_replicated("its arguments are split along different dims")
    wants: list[Layout] = []
    for number in range(2):
        shape = ask.shape(number)
        own = dim - num_dims + len(shape)
        wants.append(moved(split, own) if own >= 0 and shape[own] > 1 else REPLICATED)
    return Answer(wants, moved(split, dim))


@rule("addmm")
def addmm(ask: Ask) -> Answer:
    """Only where no matrix is split: row by row."""
    bias, x, weight = ask.summed()
    rows = isinstance(x, Split) and x.dim == 0
    if not rows or isinstance(weight, Split) or isinstance(bias, Split) or len(ask.shape(0)) > 1:
        return ask.all_replicated("it contracts a split dim with a matrix that is whole")
    return Answer([REPLICATED, x, REPLICATED], x)


@rule("einsum")
def einsum(ask: Ask) -> Answer:
    """Split along one letter of the equation: that of a parameter, if one is split."""
    equation = str(ask.given["equation"]).replace(" ", "")
    *terms, result = equation.replace("->", ",").split(",")
    plain = "->" in equation and "." not in equation
    if not plain or any(len(set(term)) < len(term) for term in terms):
        return ask.all_replicated("its equation has dims without names, or a diagonal")
    layouts = ask.summed()
    order = sorted(range(len(terms)), key=lambda index: ask.args[index] not in ask.weights)
    for index in order:
        split = layouts[index]
        if isinstance(split, Split):
            letter = terms[index][dim_of(split)]
            break
    else:
        return Answer(layouts, REPLICATED)
    wants: list[Layout] = []
    for index, term in enumerate(terms):
        own = letter in term and ask.shape(index)[term.index(letter)] > 1
        wants.append(moved(split, term.index(letter)) if own else REPLICATED)
    return Answer(wants, moved(split, result.index(letter)) if letter in result else PARTIAL)


@rule("embedding")
def embedding(ask: Ask) -> Answer:
    table, index = ask.summed()
    if isinstance(table, Split) and table.dim == 1:
        return Answer([table, REPLICATED], moved(table, len(ask.made.shape) - 1))
    if ask.given["scale_grad_by_freq"]:
        return ask.all_replicated("its gradient counts how often an index occurs in the batch")
    if not isinstance(table, Split):
        return Answer([REPLICATED, index], index)
    if table.blocks != 1:
        return ask.all_replicated("rows of its table are split in blocks")
    rows, padding = ask.shape(0)[0] // ask.size, ask.given["padding_idx"]

    def by_vocabulary(to: Emitter, args: list[fx.Node]) -> fx.Node:
        """Rows that another rank has are zeros."""
        own, here = own_index(to, args[1], rows)
        found = to.call(aten.embedding.default, args[0], own)
        if padding >= 0:  # its row gets no gradient
            pads = to.call(aten.unsqueeze.default, to.call(aten.eq.Scalar, args[1], padding), -1)
            fixed = to.call(aten.detach.default, found)
            found = to.call(aten.where.self, pads, fixed, found)
        return to.call(aten.mul.Tensor, found, to.call(aten.unsqueeze.default, here, -1))

    return Answer([table, REPLICATED], PARTIAL, by_vocabulary)


def own_index(to: Emitter, index: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Indexes into a rank's own `rows`, 0 for those of other ranks; and which are its own."""
    own = to.call(aten.sub.Tensor, index, to.call(aten.mul.Tensor, to.place(), rows))
    not_below = to.call(aten.ge.Scalar, own, 0)
    here = to.call(aten.logical_and.default, not_below, to.call(aten.lt.Scalar, own, rows))
    return to.call(aten.where.ScalarOther, here, own, 0), here
