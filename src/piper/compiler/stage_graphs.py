"""Stages of a program: what the directive `cut` asks for in, the graph of the program cut so out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.bodies.device import own_device
from piper.compiler.driver import Scheduled
from piper.compiler.source import Cuts, Source
from piper.compiler.stage_seconds import stage_seconds
from piper.cost.machine import Machine
from piper.cost.machine_file import machine_of
from piper.directives.complete import complete
from piper.errors import Call, CutError
from piper.frontend.cut.stage_choice import StageCut, choose_stages, measured_costs
from piper.frontend.name_patterns import as_patterns
from piper.frontend.tensor_splits import found_splits
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.layouts import Split
from piper.ir.precisions import Precision, precision_of
from piper.ir.well_formed import verify
from piper.runtime.launch.torchrun_environment import under_torchrun
from piper.schedules.action_costs import Costs


class Stages:
    """Chosen once, at the example batch; then the same positions of the trace at every batch size."""

    def __init__(self, source: Source | None, cut: StageCut | None) -> None:
        self.source = source
        self.cut = cut

    def measured(self, num: int, *, rows: int | None, call: Call) -> dict[str, float]:
        """What modules take on this machine's device, by path, on batches of `rows` samples."""
        if under_torchrun():
            raise CutError(
                "each rank would measure other costs, and cut the model elsewhere",
                call=call,
                legal="the costs of one measurement, as program.history_as_code() prints them",
            )
        capture = self._source(call).captured(rows or self._source(call).batch_size)
        return measured_costs(capture, num, device=own_device())

    def splits(self, chunks: Sequence[int], size: int, *, call: Call) -> dict[str, Split]:
        """How to cut parameters of some chunks over so many ranks, by patterns of names."""
        source = self._source(call)
        _, traced = source.at(source.batch_size, Cuts(stages=self.cut))
        own = [traced.chunks[number] for number in chunks]
        read = {name: traced.values[name] for chunk in own for name in chunk.inputs}
        params = [name for name, value in read.items() if value.role == "param"]
        return as_patterns(found_splits(own, size, call), params)

    def seconds(
        self,
        graph: Graph,
        history: Sequence[Record],
        *,
        machine: Machine | str,
        tag: str,
        stages: Sequence[Sequence[int]] | None,
        precision: Precision | str | None,
        call: Call,
    ) -> Costs:
        """What stages take on a machine, under the directives so far."""
        complete_graph = complete(graph, [record.call for record in history])
        scheduled = Scheduled(self._source(call), complete_graph, tuple(history), self.cut)
        regions = stages or [(region,) for region in graph.tag_values.get(tag, ())]
        asked = precision_of(precision)
        return stage_seconds(
            scheduled,
            machine_of(machine),
            stages=regions,
            tag=tag,
            dtype=asked.compute,
            float32_operators=asked.widens,
        )

    def __call__(
        self,
        tag: str,
        num: int,
        *,
        costs: Mapping[str, float] | None,
        together: Sequence[Sequence[int]] | None,
        call: Call,
    ) -> Graph:
        source = self._source(call)
        capture = source.captured(source.batch_size)
        self.cut = choose_stages(capture, tag, num, costs=costs, together=together, call=call)
        graph = source.graph(Cuts(stages=self.cut))
        verify(graph)
        return graph

    def _source(self, call: Call) -> Source:
        if self.source is None:
            raise CutError(
                "the program was read from a file, without its model",
                call=call,
                legal="piper.load_program(path, make_model, example_batch, step)",
            )
        return self.source
