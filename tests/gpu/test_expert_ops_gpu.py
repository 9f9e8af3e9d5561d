"""On a GPU grouped products are one kernel: as the loop says, with empty groups, and without a wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import piper
from piper.bodies.expert_ops import grouped_mm, has_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COUNTS = ([300, 0, 41, 0, 7, 1], [0, 0, 0, 512, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6)


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Memory that is given out next holds NaN."""
    for size in (2**12, 2**16, 2**20, 2**24):
        del_me = [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]
        del del_me
    yield


def _loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(x.split(counts), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_it_is_the_loop(counts: list[int], transposed: bool) -> None:
    torch.manual_seed(0)
    shape = (6, 256, 128) if transposed else (6, 128, 256)
    x = torch.randn(sum(counts), 128, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(shape, device="cuda") / 16).bfloat16().requires_grad_()
    sizes = torch.tensor(counts, device="cuda")
    assert has_kernel(x, 256, sizes) == bool(sum(counts))
    seen = weight.transpose(1, 2) if transposed else weight
    made = grouped_mm(x, seen, sizes)
    tangent = torch.randn_like(made)
    grads = torch.autograd.grad(made, (x, weight), tangent)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = _loop(wide[0], wide[1].transpose(1, 2) if transposed else wide[1], counts)
    others = torch.autograd.grad(expected, wide, tangent.double())
    for mine, other in zip((made, *grads), (expected, *others), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-2, atol=2e-2 * 16)
        assert mine.isfinite().all()
    assert not grads[1][sizes == 0].any()


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_mixture_never_waits(top: int) -> None:
    """Forward and backward, with an expert that nobody chooses, while every wait is an error."""
    torch.manual_seed(0)
    x = torch.randn(64, 128, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(4, 128, 128, device="cuda") / 16).bfloat16().requires_grad_()
    chosen = torch.rand(64, 3, device="cuda").topk(top).indices
    weights = torch.rand(64, top, device="cuda").bfloat16().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        made = piper.mixture(
            lambda rows, counts: grouped_mm(rows, weight, counts), x, chosen, weights, num_experts=4
        )
        return torch.autograd.grad(made, (x, weight, weights), torch.ones_like(made))

    first = step()  # kernels are loaded, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not again[1][3].any() and again[1].isfinite().all()
