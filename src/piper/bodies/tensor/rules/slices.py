"""Rules of operators that take tensors apart along a dim, or join them."""

from __future__ import annotations

from itertools import accumulate

from piper.bodies.tensor.parts import dim_of, moved
from piper.bodies.tensor.rules.rule_table import Answer, Ask, aten, first_split, positive, rule
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, block_sizes, split_in


@rule("slice")
def slice_(ask: Ask) -> Answer:
    layout, shape = ask.layouts[0], ask.shape(0)
    dim = positive(ask.given["dim"], len(shape))
    if not isinstance(layout, Split) or dim != layout.dim:
        return Answer([layout], layout)
    start, end, step = slice(ask.given.get("start"), ask.given.get("end")).indices(shape[dim])
    step = ask.given.get("step", 1)
    if (start, end, step) == (0, shape[dim], 1):
        return Answer([layout], layout)
    if layout.mirrored or layout.order:
        return ask.all_replicated("it slices along the split dim")
    every = layout.blocks == 1 and end == shape[dim] and start < step
    if every and (shape[dim] // ask.size) % step == 0:  # every second, say, of each part
        return Answer(
            [layout],
            layout,
            lambda to, args: to.call(aten.slice.Tensor, args[0], dim, start, None, step),
        )
    sizes = block_sizes(layout, shape[dim])
    edges = [0, *accumulate(sizes)]
    if step != 1 or start >= end or start not in edges or end not in edges:
        return ask.all_replicated("it slices along the split dim")
    made = split_in(dim, sizes[edges.index(start) : edges.index(end)])
    first, last = start // ask.size, end // ask.size
    return Answer(
        [layout], made, lambda to, args: to.call(aten.slice.Tensor, args[0], dim, first, last)
    )


@rule("select")
def select(ask: Ask) -> Answer:
    layout, gone = ask.layouts[0], positive(ask.given["dim"], len(ask.shape(0)))
    if not isinstance(layout, Split):
        return Answer([layout], layout)
    if gone == layout.dim:
        return ask.all_replicated("it takes one index of the split dim")
    return Answer([layout], _without(layout, gone))


@rule("unbind")
def unbind(ask: Ask) -> Answer:
    layout, gone = ask.layouts[0], positive(ask.given.get("dim", 0), len(ask.shape(0)))
    if not isinstance(layout, Split):
        return Answer([layout], ask.each(layout))
    if gone == layout.dim:
        return ask.all_replicated("it takes the split dim apart")
    return Answer([layout], ask.each(_without(layout, gone)))


def _without(split: Split, gone: int) -> Split:
    dim = dim_of(split)
    return moved(split, dim - (gone < dim))


@rule("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(ask: Ask) -> Answer:
    layout = ask.layouts[0]
    dim = positive(ask.given.get("dim", 0), len(ask.shape(0)))
    if not isinstance(layout, Split) or dim != layout.dim:
        return Answer([layout], ask.each(layout))
    if layout.mirrored:
        return ask.all_replicated("it takes the split dim apart")
    sizes = [result.shape[dim] for result in ask.made]
    blocks = list(block_sizes(layout, ask.shape(0)[dim]))
    makes: list[Layout] = []
    for size in sizes:
        own: list[int] = []
        while blocks and sum(own) < size:
            own.append(blocks.pop(0))
        if sum(own) != size or not own:
            reason = f"it splits dim {dim} in parts of {', '.join(map(str, sizes))}"
            return ask.all_replicated(reason, blocks=tuple(sizes))
        makes.append(split_in(dim, own))
    local = [size // ask.size for size in sizes]
    return Answer(
        [layout],
        makes,
        lambda to, args: to.call(aten.split_with_sizes.default, args[0], local, dim),
    )


@rule("cat")
def cat(ask: Ask) -> Answer:
    dim = positive(ask.given.get("dim", 0), len(ask.made.shape))
    if all(layout == PARTIAL for layout in ask.layouts):
        return Answer(ask.layouts, PARTIAL)
    layouts = ask.summed()
    first = first_split(layouts)
    if first is None:
        return Answer(layouts, REPLICATED)
    if first.dim != dim:
        return Answer([first] * len(ask.args), first)
    sizes: list[int] = []
    for index, layout in enumerate(layouts):
        if not isinstance(layout, Split) or layout.dim != dim or layout.mirrored:
            return ask.all_replicated("it joins tensors along the split dim")
        sizes += block_sizes(layout, ask.shape(index)[dim])
    return Answer(layouts, split_in(dim, sizes))


@rule("stack")
def stack(ask: Ask) -> Answer:
    new = positive(ask.given.get("dim", 0), len(ask.made.shape))
    layouts = ask.summed()
    first = first_split(layouts)
    if first is None:
        return Answer(layouts, REPLICATED)
    dim = dim_of(first)
    return Answer([first] * len(ask.args), moved(first, dim + (dim >= new)))


@rule("slice_scatter")
def slice_scatter(ask: Ask) -> Answer:
    dim = positive(ask.given.get("dim", 0), len(ask.made.shape))
    layout = first_split(ask.summed()[::-1])
    if layout is None or layout.dim == dim:
        return ask.all_replicated("it writes along the split dim" if layout else "")
    return Answer([layout, layout], layout)
