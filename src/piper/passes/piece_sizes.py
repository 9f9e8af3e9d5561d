"""piece_sizes: a complete logical graph in, the chunks that need finer cuts out, with their sizes."""

from __future__ import annotations

from piper.ir.graph import Graph


def piece_sizes(graph: Graph) -> dict[int, int]:
    """Chunk number -> the most bytes of parameters that one piece of it may read.

    Chunks that read no more are left out. One whose experts are sharded stays whole: only the whole
    region has the form that shard needs.
    """
    found: dict[int, int] = {}
    for node in graph.chunks:
        sizes = [owner.bucket_size for owner in node.owners if owner.bucket_size is not None]
        if sizes and node.phase == "F" and not any(o.shares == "experts" for o in node.owners):
            params = [graph.values[n] for n in node.inputs if graph.values[n].role == "param"]
            if sum(value.nbytes for value in params) > min(sizes):
                found[node.chunk] = min(found.get(node.chunk, sizes[0]), *sizes)
    return found
