"""Products in strips: a product by column or by row in; it strip by strip, and nodes around it, out.

The tokens of a product come in strips, so that one strip travels while another is computed: what a
product by column reads is gathered strip by strip, and what one by row makes is summed so. A strip has
its share of every rank's tokens and thus lies as the whole does. Elementwise code between two products
is computed on strips, too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from piper.bodies.tensor.forward_code import FLOWS
from piper.bodies.tensor.parts import dim_of, local_shape
from piper.bodies.tensor.rewrites import Marks, inserted, replaced
from piper.bodies.tensor.rules.pointwise import is_elementwise
from piper.bodies.tensor.rules.rule_table import (
    Answer,
    Ask,
    Emitter,
    aten,
    operator_name,
    rule,
    tensor_args,
)
from piper.ir.layouts import REPLICATED, Layout, Split

STRIPS = "piper_strips"  # in the meta of the functions below: how they cut
STRIP = (
    "piper_strip"  # in that of a product: which strip it is of, and how many pieces it comes later
)
# Products: where they have their tokens, and along which dim of its matrix one is cut by column.
_PRODUCTS = {"linear": (0, 0), "mm": (0, 1), "matmul": (0, 1), "addmm": (1, 1)}


@dataclass(frozen=True)
class Strips:
    """A dim is so many blocks, each with a part for so many ranks, each of which is cut into `num`."""

    num: int
    dim: int
    blocks: int = 1
    ranks: int = 1

    def fits(self, shape: Sequence[int]) -> bool:
        return shape[self.dim] % (self.blocks * self.ranks * self.num) == 0

    def shape(self, whole: Sequence[int]) -> list[int]:
        """Of one strip."""
        return [n // self.num if dim == self.dim else n for dim, n in enumerate(whole)]

    def units(self, layout: Layout) -> int:
        """The parts that lie here, each of which is cut."""
        cut = isinstance(layout, Split) and layout.dim == self.dim
        return self.blocks if cut else self.blocks * self.ranks


def cut_in_strips(whole: Tensor) -> list[Tensor]:
    """The strips of a tensor."""
    raise NotImplementedError


def joined_strips(*strips: Tensor) -> Tensor:
    """The tensor that strips are of."""
    raise NotImplementedError


@rule("cut_in_strips")
def cut_in_strips_rule(ask: Ask) -> Answer:
    how: Strips = ask.node.meta[STRIPS]
    (layout,) = ask.summed()
    dim, shape = how.dim, list(local_shape(ask.shape(0), layout, ask.size))
    units = how.units(layout)
    between = [*shape[:dim], units, how.num, shape[dim] // units // how.num, *shape[dim + 1 :]]

    def cut(to: Emitter, args: list[fx.Node]) -> fx.Node:
        parts = to.call(aten.reshape.default, args[0], between)
        parts = to.call(aten.movedim.int, parts, dim + 1, 0)
        strips = to.call(aten.reshape.default, parts, [how.num, *how.shape(shape)])
        return to.call(aten.unbind.int, strips, 0)

    return Answer([layout], ask.each(layout), cut)


@rule("joined_strips")
def joined_strips_rule(ask: Ask) -> Answer:
    how: Strips = ask.node.meta[STRIPS]
    layout = ask.summed()[0]
    dim, shape = how.dim, list(local_shape(ask.made.shape, layout, ask.size))
    units = how.units(layout)
    between = [*shape[:dim], units, shape[dim] // units // how.num, *shape[dim + 1 :]]

    def join(to: Emitter, args: list[fx.Node]) -> fx.Node:
        strips = [to.call(aten.reshape.default, arg, between) for arg in args]
        return to.call(aten.reshape.default, to.call(aten.stack.default, strips, dim + 1), shape)

    return Answer([layout] * how.num, layout, join)


AROUND_STRIPS = (cut_in_strips, joined_strips)


@dataclass
class InStrips:
    """Cuts products of one chunk over `size` ranks into `num` strips."""

    num: int
    size: int
    marks: Marks
    known: dict[tuple[fx.Node, Strips], list[fx.Node]] = field(default_factory=dict)

    def of(
        self,
        node: fx.Node,
        args: Sequence[fx.Node],
        have: Sequence[Layout],
        weights: Collection[fx.Node],
    ) -> list[fx.Node] | str:
        """The nodes that stand for a product now, in order; none if it stays; or why it stays, although
        it could be cut otherwise."""
        way = _PRODUCTS.get(operator_name(node))
        if self.num == 1 or way is None or STRIP in node.meta or node.kwargs:
            return []
        at, column = way
        tokens, matrix = node.args[at : at + 2]
        assert isinstance(tokens, fx.Node) and isinstance(matrix, fx.Node)
        lies = dict(zip(args, have, strict=True))
        cut = lies[matrix]
        if (
            matrix not in weights
            or len(matrix.meta["val"].shape) != 2
            or not isinstance(cut, Split)
        ):
            return []
        value = node.meta["val"]
        mark = lies[tokens] if cut.dim == column else self.marks.get(node, REPLICATED)
        how = self._strips(mark, len(value.shape))
        if how is None:
            return []
        if not how.fits(value.shape):
            over = f" over {how.ranks} ranks" if how.ranks > 1 else ""
            length = value.shape[how.dim] // how.blocks
            return f"{length} tokens do not divide into {self.num} strips{over}"
        new: list[fx.Node] = []
        strips, later = self._of_tokens(tokens, how, node, new)
        products = []
        for number, strip in enumerate(strips):
            given = (*node.args[:at], strip, *node.args[at + 1 :])
            shape = how.shape(value.shape)
            product = inserted(node, node.target, given, value.new_empty(shape))
            product.meta[STRIP] = number if later else 0
            products.append(self._marked(product, node))
        whole = self._marked(inserted(node, joined_strips, tuple(products), value), node)
        whole.meta[STRIPS] = how
        return replaced(node, [*new, *products, whole])

    def _strips(self, mark: Layout, dims: int) -> Strips | None:
        """Of tokens that lie so before or behind a product; None for what is cut in yet another way, and
        for a single one."""
        if dims < 2:
            return None
        if not isinstance(mark, Split):
            return Strips(self.num, dims - 2)
        plain = isinstance(mark.blocks, int) and mark == Split(dim_of(mark), mark.blocks)
        if not plain or dim_of(mark) == dims - 1:
            return None
        assert isinstance(mark.blocks, int)
        return Strips(self.num, dim_of(mark), mark.blocks, self.size)

    def _of_tokens(
        self, tokens: fx.Node, how: Strips, node: fx.Node, new: list[fx.Node]
    ) -> tuple[list[fx.Node], bool]:
        """The strips of what a product reads; and whether they are cut here, and so come all at once."""
        behind = _behind_strips(tokens, how)
        if tokens in behind or _joins(tokens, how):
            return self._strips_of(tokens, how, behind, node, new), False
        return self._cut(tokens, how, node, new), True

    def _strips_of(
        self,
        node: fx.Node,
        how: Strips,
        behind: Mapping[fx.Node, Strips],
        before: fx.Node,
        new: list[fx.Node],
    ) -> list[fx.Node]:
        """Of strips and the elementwise code `behind` them; what that reads beside strips is cut."""
        if _joins(node, how):
            return list(node.args)  # type: ignore[arg-type]
        if behind.get(node) != how:
            return self._cut(node, how, before, new)
        if (node, how) not in self.known:
            read = {
                arg: self._strips_of(arg, of_arg, behind, before, new)
                for arg, of_arg in _with_tokens(node, how)
            }
            value = node.meta["val"]
            strips = []
            for number in range(how.num):
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs),
                    lambda arg, number=number: read[arg][number] if arg in read else arg,  # type: ignore[misc]
                )
                strip = inserted(before, node.target, args, value.new_empty(how.shape(value.shape)))
                strip.kwargs = kwargs
                strip.meta = {**node.meta, "val": strip.meta["val"]}
                strips.append(self._marked(strip, node))
            new += strips
            self.known[node, how] = strips
        return self.known[node, how]

    def _cut(
        self, tokens: fx.Node, how: Strips, node: fx.Node, new: list[fx.Node]
    ) -> list[fx.Node]:
        if (tokens, how) not in self.known:
            value = tokens.meta["val"]
            together = inserted(node, cut_in_strips, (tokens,), value)
            each = value.new_empty(how.shape(value.shape))
            together.meta |= {"val": [each] * how.num, STRIPS: how}
            strips = []
            for number in range(how.num):
                strip = inserted(node, operator.getitem, (together, number), each)
                strip.meta[FLOWS] = together.meta[FLOWS]
                strips.append(self._marked(strip, tokens))
            new += [together, *strips]
            self.known[tokens, how] = strips
        return self.known[tokens, how]

    def _marked(self, new: fx.Node, like: fx.Node) -> fx.Node:
        if like in self.marks:
            self.marks[new] = self.marks[like]
        return new


def _joins(node: fx.Node, how: Strips) -> bool:
    return node.target is joined_strips and bool(node.meta[STRIPS] == how)


def _behind_strips(tokens: fx.Node, how: Strips) -> dict[fx.Node, Strips]:
    """The elementwise code between joined strips and products that read `tokens`, which nobody else
    needs whole."""
    between: dict[fx.Node, Strips] = {}
    pending = [(tokens, how)]
    while pending:
        node, of_node = pending.pop()
        if node not in between and is_elementwise(node):
            between[node] = of_node
            pending += _with_tokens(node, of_node)
    for node in sorted(between, reverse=True):
        if not all(user in between or operator_name(user) in _PRODUCTS for user in node.users):
            del between[node]
    behind: dict[fx.Node, Strips] = {}
    for node in sorted(between):
        read = _with_tokens(node, between[node])
        if any(behind.get(arg) == of_arg or _joins(arg, of_arg) for arg, of_arg in read):
            behind[node] = between[node]
    return behind


def _with_tokens(node: fx.Node, how: Strips) -> Iterator[tuple[fx.Node, Strips]]:
    """The arguments of elementwise code that have the dim that is cut, and are not spread over it."""
    made = node.meta["val"].shape
    for arg in tensor_args(node):
        shape = arg.meta["val"].shape
        dim = how.dim - (len(made) - len(shape))
        if dim >= 0 and shape[dim] == made[how.dim] > 1:
            yield arg, replace(how, dim=dim)
