"""piece_sizes: a complete logical graph in, the chunks that need finer cuts out, with their sizes."""

from __future__ import annotations

from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.ir.tensor_type import dtype_bytes

OVERLAPPED = 8  # pieces of a chunk at most, so that its gradients are reduced beside its backward
SMALLEST = 64 << 20  # bytes of such a piece
LARGEST = 512 << 20  # of one whose parameters or gradients ranks do not keep whole


def piece_sizes(graph: Graph, *, dtype: str = "", overlap: bool = True) -> dict[int, int]:
    """Chunk number -> the most bytes of parameters that one piece of it may read.

    Chunks that read no more are left out. One whose experts are sharded stays whole: only the whole
    region has the form that shard needs. Without `overlap`, only what directives ask for, and ZeRO 2 and
    3. Parameters have the dtype of the graph, or another one that they are going to be cast to.
    """
    found: dict[int, int] = {}
    for node in graph.chunks:
        if node.phase != "F" or any(owner.shares == "experts" for owner in node.owners):
            continue
        params = [graph.values[n] for n in node.inputs if graph.values[n].role == "param"]
        total = sum(value.type.size * dtype_bytes(dtype or value.dtype) for value in params)
        sizes = [owner.bucket_size for owner in node.owners if owner.bucket_size is not None]
        bounded = any(owner.zero > 1 for owner in node.owners)
        if (overlap or bounded) and not sizes and _has_copies(graph, node):
            size = max(SMALLEST, total // OVERLAPPED)
            sizes = [min(size, LARGEST) if bounded else size]
        if sizes and total > min(sizes):
            found[node.chunk] = min(found.get(node.chunk, sizes[0]), *sizes)
    return found


def _has_copies(graph: Graph, node: Chunk) -> bool:
    """Whether gradients of a chunk are reduced over ranks, without a word on how much at once."""
    sizes = dict(graph.mesh.axes)
    return any(owner.how == "replicate" and sizes[owner.axis] > 1 for owner in node.owners)
