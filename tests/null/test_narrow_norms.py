"""Norms take and give narrow tensors where only casts stand around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import piper
from piper.bodies import store
from piper.bodies.cutting.narrow_norms import narrow_norms
from piper.bodies.files.codec import decode
from piper.strategies import parallel

WIDTH = 32
BF16 = torch.bfloat16


def _given(dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, WIDTH), (WIDTH,), (WIDTH,), (6, WIDTH))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = [None if t is None else t.float() for t in (weight, bias)]
    return F.layer_norm(x.float(), (WIDTH,), *wide)


def _with_gradients(x: Tensor, weight: Tensor, bias: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (x, weight, bias)]
        result = _norm(*given).to(x.dtype)
        return (result, *torch.autograd.grad(result, given, tangent))


def _traced(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*given)


def _operators(graph: fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_both_ways_are_one_operator_each(dtype: torch.dtype) -> None:
    given = _given(dtype)
    module = _traced(_with_gradients, *given)
    wanted = module(*given)
    assert _operators(module.graph)["aten._to_copy.default"] == 3 + 1 + 1 + 3
    assert narrow_norms(module.graph) == 2
    found = _operators(module.graph)
    assert found["aten._to_copy.default"] == 0
    assert found["aten.native_layer_norm.default"] == 1
    assert found["aten.native_layer_norm_backward.default"] == 1
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if node.op == "call_function" and isinstance(val, Tensor):
            statistic = val.shape[-1:] == (1,)
            assert val.dtype == (torch.float32 if statistic else dtype), node
    module.recompile()
    for mine, other in zip(module(*given), wanted, strict=True):
        assert mine.dtype == other.dtype == dtype
        error = (mine.double() - other.double()).norm() / other.double().norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_without_parameters_too() -> None:
    x = _given()[0]
    module = _traced(lambda x: _norm(x, None, None).to(BF16), x)
    assert narrow_norms(module.graph) == 1
    assert _operators(module.graph)["aten._to_copy.default"] == 0


KEPT: dict[str, Callable[..., Any]] = {
    "its wide result is read": lambda x, w, b, _: (_norm(x, w, b).to(BF16), _norm(x, w, b) * 2),
    "its wide result is given out": lambda x, w, b, _: _norm(x, w, b),
    "it is cast to another dtype": lambda x, w, b, _: _norm(x, w, b).to(torch.float16),
    "its weight was wide": lambda x, w, b, _: F.layer_norm(
        x.float(), (WIDTH,), (w.float() + 1), b.float()
    ).to(BF16),
    "it is cast to another layout": lambda x, w, b, _: _norm(x[:, None, None], w, b).to(
        BF16, memory_format=torch.channels_last
    ),
    "its input is of another dtype": lambda x, w, b, _: _norm(x.half(), w, b).to(BF16),
}


@pytest.mark.parametrize("why", KEPT)
def test_others_stay(why: str) -> None:
    given = _given()
    module = _traced(KEPT[why], *given)
    before = _operators(module.graph)
    changed = narrow_norms(module.graph)
    if why == "its wide result is read":  # the first of the two
        assert changed == 1
        return
    assert changed == 0 and _operators(module.graph) == before


def test_results_that_were_apart_stay_apart() -> None:
    """Two casts of one result are two tensors; a body may not give one of them twice."""

    def function(x: Tensor, w: Tensor, b: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        wide = _norm(x, w, b)
        return wide.to(BF16), wide.to(BF16)

    given = _given()
    module = _traced(function, *given)
    wanted = module(*given)
    assert narrow_norms(module.graph) == 1
    module.recompile()
    found = module(*given)
    assert found[0].data_ptr() != found[1].data_ptr()
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=2**-7)


def test_norms_of_wide_models_are_as_they_were() -> None:
    x, w, b, _ = (t.float() for t in _given())
    module = _traced(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), x, w, b)
    before = _operators(module.graph)
    assert narrow_norms(module.graph) == 0 and _operators(module.graph) == before


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.maps = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            x = x + linear(norm(x)).relu()
        return x


def test_a_model_trains_nearly_alike_with_far_fewer_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, for which bodies are made so; here its kernels round statistics, too."""
    batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, operators = [], []
    for narrow in (False, True):
        if narrow:
            monkeypatch.setattr(store, "reshape_where_unsure", narrow_norms)
        program = piper.trace(Residual, batch, lambda model, x: model(x).square().mean())
        job = program.apply(parallel(dp=2, microbatches=2)).lower(
            optimizer=piper.adamw(lr=1e-2), precision="bf16"
        )
        bodies = [decode(job.bodies[name]).graph for name in job.plan.bodies]
        operators.append(sum((_operators(graph) for graph in bodies), Counter()))
        with job.launch("loopback") as run:
            losses.append([run.step(batch).loss for _ in range(8)])
    casts = [found["aten._to_copy.default"] for found in operators]
    assert casts == [3 * (4 + 7) - 1, 0]  # the batch needs no gradient
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and losses[0][-1] < 0.9 * losses[0][0]
