"""Replay: a finer graph, or one of another variant of a program, under the same directives."""

from __future__ import annotations

from collections.abc import Sequence

from piper.directives.complete import complete
from piper.ir.directive import Site
from piper.ir.graph import Graph
from piper.ir.history import Record


def replay_history(graph: Graph, history: Sequence[Record], *, training: bool = True) -> Graph:
    """The graph after all directives; they name tags, which all pieces of a chunk have.

    It is cut into stages already. Directives about backwards mean nothing to an evaluation.
    """
    for origin, record in enumerate(history):
        directive = record.directive
        if directive.recuts or (directive.of_training and not training):
            continue
        graph = directive.rewrite(graph, Site(record.call, origin, history[:origin]))
    return complete(graph, [record.call for record in history])
