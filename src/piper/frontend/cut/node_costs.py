"""Costs: a Capture in, the estimated seconds of each captured node out, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piper.bodies.casts import CapturedRun
from piper.bodies.operators import CostWatch
from piper.frontend.capture.capture import Capture, value_of

_BACKWARD = 2  # times the forward: a gradient for each of the two factors of a product


def node_costs(capture: Capture) -> dict[fx.Node, float]:
    """Runs the captured graph once on fake tensors, as on a device that is bound by flops or bytes."""
    root = torch.nn.Module()
    for name, constant in capture.constants.items():
        root.register_buffer(name, constant)
    run = _Run(root, graph=capture.graph)
    inputs = [value_of(node) for node in capture.origins]
    with inputs[0].fake_mode, torch.no_grad():
        run.run(*inputs)
    flowing = capture.facts.flowing
    return {n: cost * (1 + _BACKWARD * (n in flowing)) for n, cost in run.costs.items()}


class _Run(CapturedRun):
    def __init__(self, module: torch.nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.costs: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        with CostWatch() as watch:
            result = super().run_node(n)
        self.costs[n] = watch.seconds
        return result
