"""Ends of chunks around experts: a program and its cut parameters in; which outputs pass on as they
are made, for the one chunk that reads them, out.

Experts that are cut make terms of sums, of every copy of a row. Copies are added up behind the region,
so that there is less to sum over ranks there. Before it likewise: gradients of copies are added up, and
then over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from piper.bodies.tensor.changes import Ends
from piper.bodies.tensor.rules.rule_table import operator_name
from piper.frontend.traced import Traced, TracedChunk
from piper.ir.layouts import Layout, Split

_CASTS = ("to", "_to_copy")
_OF_WEIGHTS = (*_CASTS, "transpose", "t", "permute", "mT")


class EndsOfChunks:
    def __init__(self, traced: Traced) -> None:
        self.readers: dict[str, list[TracedChunk]] = defaultdict(list)
        for chunk in traced.chunks:
            for name in chunk.inputs:
                self.readers[name].append(chunk)
        for value in traced.values.values():
            if value.source:  # read in another layout, along an axis that was cut before
                self.readers.pop(value.source, None)
        self.results = (traced.loss, traced.count)

    def of(self, chunk: TracedChunk, layouts: Mapping[str, Layout]) -> Ends:
        """Of one chunk's outputs, where parameters lie as `layouts` say."""
        read = {
            number: self.readers[name][0]
            for number, name in enumerate(chunk.outputs)
            if len(self.readers.get(name, ())) == 1 and name not in self.results
        }
        partial = [n for n, by in read.items() if _are_put_back(by, chunk.outputs[n])]
        shared = [n for n, by in read.items() if _are_multiplied(by, chunk.outputs[n], layouts)]
        return Ends(tuple(partial), tuple(shared))


def _are_put_back(chunk: TracedChunk, name: str) -> bool:
    """Whether all that a chunk does with some rows is to put them back in their order."""
    return {operator_name(user) for user, _ in _uses(chunk, name)} == {"put_rows"}


def _are_multiplied(chunk: TracedChunk, name: str, layouts: Mapping[str, Layout]) -> bool:
    """Whether rows go into products with experts that are cut, and nowhere else."""
    uses = _uses(chunk, name)
    return bool(uses) and all(
        operator_name(user) == "grouped_mm"
        and user.args[0] is rows
        and _is_cut(chunk, user.args[1], layouts)
        for user, rows in uses
    )


def _uses(chunk: TracedChunk, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes that read an input, each with what it reads: the input, or a cast of it."""
    holders = [node for node in chunk.code.graph.nodes if node.op == "placeholder"]
    found, stack = [], [holders[chunk.inputs.index(name)]]
    while stack:
        node = stack.pop()
        for user in node.users:
            if operator_name(user) in _CASTS:
                stack.append(user)
            else:
                found.append((user, node))
    return found


def _is_cut(chunk: TracedChunk, weight: object, layouts: Mapping[str, Layout]) -> bool:
    while isinstance(weight, fx.Node) and weight.op != "placeholder":
        weight = weight.args[0] if operator_name(weight) in _OF_WEIGHTS else None
    if not isinstance(weight, fx.Node):
        return False
    holders = [node for node in chunk.code.graph.nodes if node.op == "placeholder"]
    layout = layouts.get(chunk.inputs[holders.index(weight)])
    return isinstance(layout, Split) and bool(layout.dim)
