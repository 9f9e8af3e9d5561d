"""Which parameters to split, and how: a chunk's code in, splits of parameters by name out.

Optimistic. Every matrix whose input is whole is cut by column, every matrix whose input is split along
what it contracts by row, every table by its rows. Where a split would be gathered before a matrix
contracts it, the matrices it comes from stay whole or, if only the parts of a fused matrix are in the
way, are cut in blocks. Then again, until nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from piper.bodies.chunk_code import ChunkCode
from piper.bodies.tensor.analysis import Analysis
from piper.bodies.tensor.cut_over_ranks import prepared
from piper.bodies.tensor.forward_code import forward_code
from piper.bodies.tensor.rules.losses import vocabulary_terms
from piper.bodies.tensor.rules.rule_table import operator_name, tensor_args
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides, split_in

# The input, the matrix and the bias among the arguments; the dims of columns and rows of the matrix.
_MATRICES: dict[str, tuple[int, int, int | None, int, int]] = {
    "linear": (0, 1, 2, 0, 1),
    "addmm": (1, 2, 0, 1, 0),
    "mm": (0, 1, None, 1, 0),
}
_CASTS = ("_to_copy", "to")


def infer_splits(
    code: ChunkCode,
    names: Sequence[str],
    size: int,
    *,
    given: Mapping[str, Layout],
    fixed: Collection[str],
) -> dict[str, Split]:
    """Splits of parameters; those in `fixed` stay whole."""
    whole, in_blocks = set(fixed), dict[str, tuple[int, ...]]()
    while True:
        graph = forward_code(code).graph
        prepared(graph, names, given, size, marks={}, batch={}, joined=())
        analysis = _Optimist(graph, code, names, given, size, {})
        analysis.whole, analysis.in_blocks = whole, in_blocks
        analysis.run()
        fused = {n: sizes for n, sizes in analysis.fused().items() if n not in in_blocks}
        in_blocks.update(fused)
        gathered = set() if fused else analysis.gathered() - set(given)
        if not fused and not gathered - whole:
            return analysis.splits()
        whole |= gathered


class _Optimist(Analysis):
    """Decides on a parameter where it is first read."""

    whole: Collection[str] = ()
    in_blocks: Mapping[str, tuple[int, ...]] = {}

    def call(self, node: fx.Node) -> None:
        name = operator_name(node)
        if name in _MATRICES:
            self._decide_matrix(node, *_MATRICES[name])
        elif name == "embedding":
            table, index = tensor_args(node)
            if index not in self.free:
                self._decide(table, 0, None)
        super().call(node)

    def _decide_matrix(
        self, node: fx.Node, x: int, weight: int, bias: int | None, column: int, row: int
    ) -> None:
        args = tensor_args(node)
        if len(args) <= max(x, weight) or len(args[weight].meta["val"].shape) != 2:
            return
        layout = self.layouts[args[x]]
        biased = args[bias] if bias is not None and bias < len(args) else None
        if isinstance(layout, Split) and layout.dim == len(args[x].meta["val"].shape) - 1:
            if layout.blocks == 1:
                self._decide(args[weight], row, None)
        elif layout in (REPLICATED, PARTIAL):
            self._decide(args[weight], column, biased)

    def _decide(self, weight: fx.Node, dim: int, bias: fx.Node | None) -> None:
        root = self._uncast(weight)
        if root is None or self.readers[root] or self.layouts[root] != REPLICATED:
            return
        name = self.inputs[root]
        split = split_in(dim, self.in_blocks[name]) if name in self.in_blocks else Split(dim)
        if name in self.whole or not divides(split, root.meta["val"].shape, self.size):
            return
        self._lay(weight, split)
        of_bias = self._uncast(bias) if bias is not None else None
        if bias is not None and of_bias is not None and len(of_bias.meta["val"].shape) == 1:
            self._lay(bias, Split(0, split.blocks))

    def _uncast(self, node: fx.Node) -> fx.Node | None:
        """The parameter of which a node is at most a cast."""
        while node.op != "placeholder" and node in self.weights and operator_name(node) in _CASTS:
            node = tensor_args(node)[0]
        return node if node.op == "placeholder" and node in self.weights else None

    def _lay(self, node: fx.Node, split: Split) -> None:
        chain = [node]
        while chain[-1].op != "placeholder":
            chain.append(tensor_args(chain[-1])[0])
        self.layouts[chain.pop()] = split
        for cast in reversed(chain):
            super().call(cast)

    def splits(self) -> dict[str, Split]:
        found = {self.inputs[node]: self.layouts[node] for node in self.readers}
        return {name: split for name, split in found.items() if isinstance(split, Split)}

    def fused(self) -> dict[str, tuple[int, ...]]:
        """Parameters that need blocks, for an operator that takes a fused result apart."""
        found: dict[str, tuple[int, ...]] = {}
        for note in self.notes:
            if note.blocks and all(block % self.size == 0 for block in note.blocks):
                for name in self._cut_for(tensor_args(note.node)[0]):
                    found.setdefault(name, note.blocks)
        return found

    def gathered(self) -> set[str]:
        """Parameters whose split is gathered again, or is summed by something other than a matrix."""
        for node in self.graph.nodes:
            if node.op == "call_function" and operator_name(node) in ("sum", "mean"):
                cut = self._cut_for(tensor_args(node)[0])
                if cut and self.layouts[node] == PARTIAL:
                    return cut
        found: set[str] = set()
        for change in self.changes.values():
            if isinstance(change.have, Split) and change.source.target is not vocabulary_terms:
                found |= self._cut_for(change.source)
        return found

    def _cut_for(self, node: fx.Node) -> set[str]:
        """The parameters whose splits a split Value comes from."""
        found: set[str] = set()
        stack, seen = [node], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            layout = self.layouts[node]
            if node in self.readers:
                found |= {self.inputs[node]} if isinstance(layout, Split) else set()
            elif isinstance(layout, (Split, list)):
                stack += tensor_args(node)
        return found
