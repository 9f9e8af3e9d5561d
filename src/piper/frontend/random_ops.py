"""Random operations: refused, with the user's line."""

from __future__ import annotations

from piper.errors import TraceError
from piper.frontend.capture import Capture, callee, source_of


def refuse_random(capture: Capture) -> None:
    """Raise at the first operation whose result depends on a generator."""
    for node in capture.graph.nodes:
        if node in capture.facts.random:
            raise TraceError(
                f"{callee(node)} is random ({source_of(node)}), and randomness is not supported yet",
                legal="a model without dropout, or in eval mode",
            )
