"""recompute: a region's saved Values are dropped and computed again in its backward."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import msgspec

from piper.errors import RecomputeError
from piper.ir.directive import Selecting, Site
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Node
from piper.ir.select import select

Keep = Literal["nothing", "pieces", "expensive", "everything"]
KEEPS = get_args(Keep)


class Recompute(Selecting, frozen=True, kw_only=True):
    """Drop what the selected chunks save for their backwards; a backward computes it again.

    `keep="nothing"` keeps a chunk's inputs only; `keep="expensive"` also the results of matrix
    products and attention, so that only what is cheap is computed twice. With `keep="everything"`
    nothing is, which `lower` may otherwise choose under a memory limit. The backward runs the code of
    its forward first. Random operations give the same numbers again.

    Code that `shard_tensor` cuts has communication between its pieces, and a layer with sharded experts
    has some around them. With `keep="nothing"` such code runs again with that communication, layer by
    layer, and of each layer only the inputs are kept. `keep="pieces"` also keeps what each piece reads,
    so that nothing is communicated twice but what is gathered; `keep="expensive"` does so, too.

    Requires:
        1. The selector names no phase: a backward computes what its forward did.
        2. `keep` is "nothing", "pieces", "expensive" or "everything".

    Rewrite:
        s.recompute(where(PP=0), keep='expensive')
        # changes 2 nodes

        F[PP=0]  B[PP=0]
            recompute '' -> expensive

    Example:
        >>> s.recompute(where(PP=0, EP=None), keep="expensive")
        >>> s.graph.nodes["F[PP=0.0]"].recompute
        'expensive'
    """

    keep: Keep = "nothing"
    of_training: ClassVar[bool] = True

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        if self.selector.phase or self.selector.comm:
            raise RecomputeError(
                f"{self.selector} names a phase",
                call=site.call,
                requirement=1,
                legal="where() of tags alone",
            )
        if self.keep not in KEEPS:
            raise RecomputeError(
                f"keep={self.keep!r}",
                call=site.call,
                requirement=2,
                legal='keep="nothing", keep="pieces", keep="expensive" or keep="everything"',
            )
        changed: dict[str, Node] = {}
        for name in select(graph, self.selector, call=site.call):
            node = graph.nodes[name]
            if isinstance(node, Chunk):
                changed[name] = msgspec.structs.replace(node, recompute=self.keep)
        return graph.replacing(changed)
