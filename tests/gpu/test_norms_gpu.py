"""Norms of narrow tensors without casts: what CUDA's kernels make of them."""

from __future__ import annotations

import pytest
import torch

import piper
from piper.bodies import store
from piper.bodies.files.codec import decode
from piper.strategies import parallel
from tests.null.test_narrow_norms import WIDTH, Residual

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_aten = torch.ops.aten
NORMS = (_aten.native_layer_norm.default, _aten.native_layer_norm_backward.default)


def test_a_kernel_rounds_once_and_keeps_wide_statistics() -> None:
    torch.manual_seed(0)
    x, weight, bias, tangent = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((512, WIDTH), (WIDTH,), (WIDTH,), (512, WIDTH))
    )
    made = _aten.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)
    wide = _aten.native_layer_norm(x.float(), [WIDTH], weight.float(), bias.float(), 1e-5)
    assert [t.dtype for t in made] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(made[0].float(), wide[0], rtol=2**-8, atol=2**-8)
    for mine, other in zip(made[1:], wide[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    mask = [True, True, True]
    back = _aten.native_layer_norm_backward(
        tangent, x, [WIDTH], made[1], made[2], weight, bias, mask
    )
    wide = _aten.native_layer_norm_backward(
        tangent.float(), x.float(), [WIDTH], wide[1], wide[2], weight.float(), bias.float(), mask
    )
    for mine, other in zip(back, wide, strict=True):
        assert mine.dtype == torch.bfloat16
        error = (mine.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-8


@pytest.mark.parametrize("compile", [False, True])
def test_training_is_that_with_casts(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(64, WIDTH)
    losses = []
    for narrow in (True, False):
        if not narrow:
            monkeypatch.setattr(store, "narrow_norms", lambda graph: 0)
        program = piper.trace(Residual, batch, lambda model, x: model(x).square().mean())
        job = program.apply(parallel(microbatches=2)).lower(
            optimizer=piper.adamw(lr=1e-3), precision="bf16", device="cuda"
        )
        graphs = [decode(job.bodies[name]).graph for name in job.plan.bodies]
        norms = [node for graph in graphs for node in graph.nodes if node.target in NORMS]
        assert len(norms) == 6
        casts = [
            arg.target is _aten._to_copy.default for node in norms for arg in node.all_input_nodes
        ]
        assert any(casts) != narrow
        with job.launch("single", compile=compile) as run:
            losses.append([run.step(batch).loss for _ in range(8)])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
