"""stream: a named queue on every device, for directives to name."""

from __future__ import annotations

from typing import Literal

import msgspec

from piper.errors import MeshError
from piper.ir.directive import Directive, Site
from piper.ir.graph import Graph, Stream


class _Named(Directive, frozen=True):
    name: str


class DeclareStream(_Named, frozen=True, kw_only=True, tag="stream"):
    """Name a queue, with its priority and how many SMs its communication may take.

    A stream is an in-order queue on every device. Directives that communicate name theirs.
    `priority` is "normal" or "high". Communication takes at most `max_sms` SMs, and matrix products that
    are expected beside it leave it as many; without, they leave 4. Both are for CUDA, on CPU every
    stream is alike.

    Requires:
        1. No stream has that name yet.

    Rewrite:
        s.stream('dp', priority='high')
        # changes no node

        streams + Stream(name=dp, priority=high)

    Example:
        >>> dp = s.stream("dp", priority="high")
        >>> s.replicate(where(PP=0, EP=None), over=("dp", "ep"), reduce_stream=dp)
        >>> {owner.stream for owner in s.graph.nodes["F[PP=0.0]"].owners}
        {'dp'}
    """

    priority: Literal["normal", "high"] = "normal"
    max_sms: int | None = None

    def result(self) -> str:
        return self.name

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        if any(stream.name == self.name for stream in graph.streams):
            raise MeshError(
                f"the stream {self.name!r} is declared twice", call=site.call, requirement=1
            )
        declared = Stream(self.name, self.priority, self.max_sms)
        return msgspec.structs.replace(graph, streams=(*graph.streams, declared))
