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
from piper.bodies.tensor.changes import Ref
from piper.bodies.tensor.cut_over_ranks import prepared
from piper.bodies.tensor.forward_code import forward_code
from piper.bodies.tensor.rules.losses import vocabulary_terms
from piper.bodies.tensor.rules.rule_table import operator_name, positive, tensor_args
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides, split_in

# The input, the matrix and the bias among the arguments; the dims of columns and rows of the matrix,
# and how many dims there are: experts have one matrix each.
_MATRICES: dict[str, tuple[int, int, int | None, int, int, int]] = {
    "linear": (0, 1, 2, 0, 1, 2),
    "addmm": (1, 2, 0, 1, 0, 2),
    "mm": (0, 1, None, 1, 0, 2),
    "grouped_mm": (0, 1, None, 2, 1, 3),
}
_CASTS = ("_to_copy", "to")
_TRANSPOSES = ("t", "transpose")


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
        self,
        node: fx.Node,
        x: int,
        weight: int,
        bias: int | None,
        column: int,
        row: int,
        num_dims: int,
    ) -> None:
        args = tensor_args(node)
        if len(args) <= max(x, weight) or len(args[weight].meta["val"].shape) != num_dims:
            return
        layout = self.layouts[args[x]]
        biased = args[bias] if bias is not None and bias < len(args) else None
        if isinstance(layout, Split) and layout.dim == len(args[x].meta["val"].shape) - 1:
            if layout.blocks == 1:
                self._decide(args[weight], row, None)
        elif layout in (REPLICATED, PARTIAL):
            self._decide(args[weight], column, biased)

    def _decide(self, weight: fx.Node, dim: int, bias: fx.Node | None) -> None:
        chain = self._chain(weight)
        if not chain:
            return
        for made in chain[:-1]:
            dim = _dim_before(made, dim)
        root = chain[-1]
        if self.readers[root] or self.layouts[root] != REPLICATED:
            return
        name = self.inputs[root]
        split = split_in(dim, self.in_blocks[name]) if name in self.in_blocks else Split(dim)
        if name in self.whole or not divides(split, root.meta["val"].shape, self.size):
            return
        self._lay(chain, split)
        of_bias = self._chain(bias) if bias is not None else []
        if of_bias and len(of_bias[-1].meta["val"].shape) == 1:
            self._lay(of_bias, Split(0, split.blocks))

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """From a node to the parameter of which it is at most a cast or has other dims; empty if it is
        more."""
        chain = [node]
        while chain[-1].op != "placeholder":
            name = operator_name(chain[-1])
            if chain[-1] not in self.weights or name not in (*_CASTS, *_TRANSPOSES, "unsqueeze"):
                return []
            chain.append(tensor_args(chain[-1])[0])
        return chain if chain[-1] in self.weights else []

    def _lay(self, chain: list[fx.Node], split: Split) -> None:
        self.layouts[chain[-1]] = split
        for made in reversed(chain[:-1]):
            super().call(made)

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
        if any(operator_name(node) == "grouped_mm" for node in self.graph.nodes):
            found |= self._split_results()
            return found or self._sums_inside()
        return found

    def _split_results(self) -> set[str]:
        """Of experts: parameters for which results are split."""
        found: set[str] = set()
        for ref, layout in zip(self.outputs, self.out_layouts, strict=True):
            if isinstance(layout, Split) and isinstance(ref.of, fx.Node):
                found |= self._cut_for(ref.of)
        return found

    def _sums_inside(self) -> set[str]:
        """Of experts: parameters for whose partial sums there is more code than what ends with them."""
        found: set[str] = set()
        for change in self.changes.values():
            if change.have == PARTIAL and Ref("change", change) not in self.outputs:
                found |= self._cut_for(change.source, sums=True)
        return found

    def _cut_for(self, node: fx.Node, *, sums: bool = False) -> set[str]:
        """The parameters whose splits a split Value comes from, or with `sums` a sum of parts."""
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
            elif isinstance(layout, (Split, list)) or (sums and layout == PARTIAL):
                stack += tensor_args(node)
        return found


def _dim_before(node: fx.Node, dim: int) -> int:
    """The dim of what is cast, transposed or unsqueezed that is `dim` of the result."""
    name, num_dims = operator_name(node), len(node.meta["val"].shape)
    if name in _CASTS:
        return dim
    if name == "unsqueeze":
        return dim - (dim > positive(int(node.args[1]), num_dims))  # type: ignore[arg-type]
    pair = (0, 1) if name == "t" else node.args[1:3]
    one, two = (positive(int(each), num_dims) for each in pair)  # type: ignore[arg-type]
    return two if dim == one else one if dim == two else dim
