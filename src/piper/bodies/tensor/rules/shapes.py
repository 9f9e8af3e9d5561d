"""Rules of operators that give elements other indexes, and change none."""

from __future__ import annotations

from collections.abc import Callable

from piper.bodies.tensor.parts import dim_of, local_shape, moved, reshaped
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Rule, aten, positive, rule
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
def view(ask: Ask) -> Answer:
    layout = ask.layouts[0]
    made: Layout | None = layout
    if isinstance(layout, Split):
        made = reshaped(layout, ask.shape(0), ask.made.shape, ask.size)
    if made is None:
        return ask.all_replicated("the reshape mixes the parts of a split dim", _in_blocks(ask))
    shape = list(local_shape(ask.made.shape, made, ask.size))
    others = [REPLICATED] * (len(ask.args) - 1)
    return Answer(
        [layout, *others], made, lambda to, args: to.call(aten.reshape.default, args[0], shape)
    )


def _in_blocks(ask: Ask) -> tuple[int, ...]:
    """Sizes of equal blocks in which the reshape keeps parts of the dim apart: [3 * n] -> [3, n]."""
    layout = ask.layouts[0]
    assert isinstance(layout, Split)
    length = ask.shape(0)[dim_of(layout)]
    for num_blocks in ask.made.shape:
        split = Split(layout.dim, num_blocks, mirrored=layout.mirrored)
        fits = num_blocks > 1 and divides(split, ask.shape(0), ask.size)
        if fits and reshaped(split, ask.shape(0), ask.made.shape, ask.size) is not None:
            return (length // num_blocks,) * num_blocks
    return ()


def dims_moved(order: Callable[[Ask, int], list[int]]) -> Rule:
    """Of an operator that puts dims in another `order`."""

    def moving(ask: Ask) -> Answer:
        layout = ask.layouts[0]
        if not isinstance(layout, Split):
            return Answer([layout], layout)
        return Answer([layout], moved(layout, order(ask, len(ask.shape(0))).index(dim_of(layout))))

    return moving


def _transposed(ask: Ask, num_dims: int) -> list[int]:
    order = list(range(num_dims))
    one, two = (positive(ask.given[name], num_dims) for name in ("dim0", "dim1"))
    order[one], order[two] = two, one
    return order


def _moved_dim(ask: Ask, num_dims: int) -> list[int]:
    source, destination = (positive(ask.given[n], num_dims) for n in ("source", "destination"))
    order = [dim for dim in range(num_dims) if dim != source]
    order.insert(destination, source)
    return order


def _permuted(ask: Ask, num_dims: int) -> list[int]:
    return [positive(dim, num_dims) for dim in ask.given["dims"]]


def _last_two(ask: Ask, num_dims: int) -> list[int]:
    return [*range(num_dims - 2), num_dims - 1, num_dims - 2]


rule("transpose")(dims_moved(_transposed))
rule("permute")(dims_moved(_permuted))
rule("t")(dims_moved(lambda ask, num_dims: list(range(num_dims))[::-1]))
rule("mT", "adjoint")(dims_moved(_last_two))


@rule("movedim")
def movedim(ask: Ask) -> Answer:
    if not isinstance(ask.given["source"], int):
        return ask.all_replicated("several dims are moved at once")
    return dims_moved(_moved_dim)(ask)


@rule("unsqueeze")
def unsqueeze(ask: Ask) -> Answer:
    layout, new = ask.layouts[0], positive(ask.given["dim"], len(ask.made.shape))
    if not isinstance(layout, Split):
        return Answer([layout], layout)
    dim = dim_of(layout)
    return Answer([layout], moved(layout, dim + (dim >= new)))


@rule("squeeze")
def squeeze(ask: Ask) -> Answer:
    layout, shape = ask.layouts[0], ask.shape(0)
    if not isinstance(layout, Split):
        return Answer([layout], layout)
    dims = ask.given.get("dim", range(len(shape)))
    dims = [dims] if isinstance(dims, int) else dims
    gone = [d for d in (positive(dim, len(shape)) for dim in dims) if shape[d] == 1]
    dim = dim_of(layout)
    # Named, for a part may be 1 long where the whole is not.
    return Answer(
        [layout],
        moved(layout, dim - sum(other < dim for other in gone)),
        lambda to, args: to.call(aten.squeeze.dims, args[0], gone),
    )


@rule("expand", "expand_as", "broadcast_to")
def expand(ask: Ask) -> Answer:
    layout, made = ask.layouts[0], ask.layouts[0]
    if isinstance(layout, Split):
        made = moved(layout, dim_of(layout) + len(ask.made.shape) - len(ask.shape(0)))
    shape = list(local_shape(ask.made.shape, made, ask.size))
    others = [REPLICATED] * (len(ask.args) - 1)
    return Answer(
        [layout, *others], made, lambda to, args: to.call(aten.expand.default, args[0], shape)
    )


@rule("repeat_interleave")
def repeat_interleave(ask: Ask) -> Answer:
    layout = ask.summed()[0]
    repeats, dim = ask.given.get("repeats"), ask.given.get("dim")
    if not isinstance(repeats, int) or dim is None or not isinstance(layout, Split):
        return ask.all_replicated("numbers of repetitions are data")
    if isinstance(layout.blocks, tuple) and positive(dim, len(ask.shape(0))) == layout.dim:
        return Answer([layout], Split(layout.dim, tuple(n * repeats for n in layout.blocks)))
    return Answer([layout], layout)


@rule("own_leaf")
def own_leaf(ask: Ask) -> Answer:
    """A leaf cut along another axis already."""
    layout = ask.layouts[0]
    if layout == PARTIAL or (isinstance(layout, Split) and layout.dim == ask.given["dim"]):
        return ask.all_replicated("the same dim is cut along two axes")
    return Answer([layout, REPLICATED], layout)
