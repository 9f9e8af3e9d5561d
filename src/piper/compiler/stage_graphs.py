"""Stages of a program: what the directive `cut` asks for in, the graph of the program cut so out."""

from __future__ import annotations

from collections.abc import Mapping

from piper.compiler.source import Cuts, Source
from piper.errors import Call, CutError
from piper.frontend.cut.stage_choice import StageCut, choose_stages
from piper.ir.graph import Graph
from piper.ir.well_formed import verify


class Stages:
    """Chosen once, at the example batch; then the same positions of the trace at every batch size."""

    def __init__(self, source: Source | None, cut: StageCut | None) -> None:
        self.source = source
        self.cut = cut

    def __call__(
        self, tag: str, num: int, *, costs: Mapping[str, float] | None, call: Call
    ) -> Graph:
        if self.source is None:
            raise CutError(
                "the program was read from a file, without its model",
                call=call,
                legal="piper.load_program(path, make_model, example_batch, step)",
            )
        rows = self.source.batch_size
        capture = self.source.captured(rows)
        self.cut = choose_stages(capture, tag, num, costs=costs, call=call)
        graph = self.source.graph(Cuts(stages=self.cut))
        verify(graph)
        return graph
