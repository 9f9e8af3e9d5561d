"""Stage seconds: a program and a machine in; what each stage takes there, and a message, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from piper.bodies.device import own_device
from piper.compiler.driver import Scheduled, bodies_on, refine
from piper.cost.estimate import NodeSeconds
from piper.cost.machine import Machine
from piper.directives.halves import split_backwards
from piper.ir.communication import communication
from piper.passes.lower import Lowering, run_passes
from piper.schedules.action_costs import Costs


def stage_seconds(
    scheduled: Scheduled,
    machine: Machine,
    *,
    stages: Sequence[Sequence[int]],
    tag: str,
    dtype: str,
    float32_operators: bool,
) -> Costs:
    """F, BI and BW of one microbatch on one rank, by the very bodies that lowering would make: as the
    machine has measured them, else by their operations and bytes."""
    source = scheduled.source.variant(
        dtype=dtype, float32_operators=float32_operators, training=True, cut=scheduled.stages
    )
    logical, traced = refine(scheduled, source)
    logical = split_backwards(logical, lambda node: True)
    device = "cpu" if machine.host_computes else own_device()
    bodies, asked = bodies_on(device, source, logical, traced)
    graph = run_passes(
        Lowering(logical, bodies, asked.flops, scheduled.calls), last="transfers"
    ).graph
    seconds = NodeSeconds(graph, asked.flops, machine)
    totals: dict[tuple[int | None, str], float] = defaultdict(float)
    for node in graph.chunks:
        phase = "BI" if node.phase == "R" else node.phase
        totals[node.tag(tag), phase] += seconds(node) / logical.num_microbatches

    def per_stage(phase: str) -> tuple[float, ...]:
        return tuple(
            _rounded(sum(totals[region, phase] for region in members)) for members in stages
        )

    messages = [seconds(comm) for comm in graph.comms if communication(comm.comm).sends]
    comm = _rounded(max(messages, default=0.0))
    return Costs(F=per_stage("F"), BI=per_stage("BI"), BW=per_stage("BW"), comm=comm)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
