"""`annotate` where nothing is traced."""

from __future__ import annotations

import torch
from torch import nn

import piper


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x).relu()
        return x


def test_a_compiler_sees_the_same_code_each_time() -> None:
    """Regions that went on counting would be recompiled in each call."""
    torch._dynamo.reset()
    seen: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(module)
        return module

    model = Tagged()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert len(seen) == 1


def test_each_trace_counts_from_0() -> None:
    for _ in range(2):
        program = piper.trace(Tagged, torch.ones(2, 4), lambda model, x: model(x).mean())
        assert sorted({node.tag("PP") for node in program.graph.chunks}) == [0, 1]
