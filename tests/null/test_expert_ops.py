"""Products with one matrix per group: the loop over groups, and the one kernel that stands for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from piper.bodies import expert_ops
from piper.bodies.expert_ops import (
    grouped_mm,
    grouped_mm_weight,
    has_kernel,
    in_one_kernel,
    weight_in_one_kernel,
)
from piper.training.verify import relative_error

COUNTS = ([3, 0, 5, 0], [0, 0, 8, 0], [0, 7, 0, 1], [2, 2, 2, 2], [0, 0, 0, 0])
_torch_kernel = torch._grouped_mm


def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def _given(counts: list[int], *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 8, dtype=torch.float64, requires_grad=True)
    shape = (len(counts), 16, 8) if transposed else (len(counts), 8, 16)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.tensor(counts)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_it_is_the_loop(counts: list[int], transposed: bool) -> None:
    x, weight, sizes = _given(counts, transposed=transposed)
    seen = weight.transpose(1, 2) if transposed else weight
    results = [product(x, seen, sizes) for product in (grouped_mm, _loop)]
    tangent = torch.randn_like(results[0])
    mine, other = (torch.autograd.grad(result, (x, weight), tangent) for result in results)
    assert relative_error(results[0].detach(), results[1].detach()) < 1e-14
    for grad, expected in zip(mine, other, strict=True):
        assert relative_error(grad, expected) < 1e-14
    assert mine[1].is_contiguous(), "the gradient of a transposed parameter would be copied"
    assert not mine[1][sizes == 0].any()


def _strict_kernel(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """torch's kernel with the demands that it has on CUDA, and garbage where groups are empty."""
    assert offs.dtype == torch.int32
    counts = offs.diff(prepend=offs.new_zeros(1))
    for matrix in (left, right):
        *outer, rows, columns = matrix.stride()
        dense, other = (columns, rows) if columns == 1 else (rows, columns)
        assert dense == 1 and matrix.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in (*outer, other))
    if right.dim() == 3:
        assert left.stride(1) == 1
        return _torch_kernel(left, right, offs=offs)
    assert left.stride(0) == 1 and left.stride(1) > 1 and right.stride(1) == 1
    out = _torch_kernel(left, right, offs=offs)
    out[counts == 0] = float("nan")
    return out


def _views(tensor: Tensor) -> dict[str, Tensor]:
    """The same numbers in memory of other forms."""
    shifted = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)[3 : tensor.numel() + 3]
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    return {
        "dense": tensor,
        "columns first": tensor.mT.contiguous().mT,
        "not at 16 bytes": shifted.view_as(tensor).copy_(tensor),
        "rows not at 16 bytes": wide[..., : tensor.shape[-1]].copy_(tensor),
        "expanded": tensor[..., :1].expand_as(tensor),
        "one row with stride 1": tensor[:1].as_strided(tensor[:1].shape, (1,) * tensor.dim()),
    }


@pytest.mark.parametrize("form", [*_views(torch.ones(8, 8))][:5])
@pytest.mark.parametrize("counts", COUNTS[:4], ids=str)
def test_one_kernel_is_the_loop(
    counts: list[int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_grouped_mm", _strict_kernel)
    x, weight, sizes = (tensor.detach() for tensor in _given(counts))
    x, weight = _views(x.bfloat16())[form], _views(weight.bfloat16())[form]
    grad = _views(torch.randn(len(x), 16).bfloat16())[form]
    assert torch.equal(in_one_kernel(x, weight, sizes), grouped_mm(x, weight, sizes))
    back = in_one_kernel(grad, weight.transpose(1, 2), sizes)
    assert torch.equal(back, grouped_mm(grad, weight.transpose(1, 2), sizes))
    made = weight_in_one_kernel(x, grad, sizes)
    assert torch.equal(made, grouped_mm_weight(x, grad, sizes))
    assert not made[sizes == 0].any()


def test_one_row_with_a_stride_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls it contiguous, and the kernel would take it for a column."""
    monkeypatch.setattr(torch, "_grouped_mm", _strict_kernel)
    counts = torch.tensor([0, 1])
    x, grad = (_views(torch.randn(1, n).bfloat16())["one row with stride 1"] for n in (8, 16))
    made = weight_in_one_kernel(x, grad, counts)
    assert torch.equal(made, grouped_mm_weight(x, grad, counts))


def test_the_host_never_reads_counts_on_cuda() -> None:
    """Fake tensors refuse to say what they hold."""
    with FakeTensorMode():
        counts = torch.empty(4, dtype=torch.int64, device="cuda")
        x, weight = _on_cuda(32, 8), _on_cuda(4, 8, 16)
        assert has_kernel(x, 16, counts)
        with pytest.raises(DataDependentOutputException):
            counts.tolist()
        made = grouped_mm._init_fn(x, weight, counts)
        grad = grouped_mm_weight._init_fn(x, _on_cuda(32, 16), counts)
    assert made.shape == (32, 16) and grad.shape == (4, 8, 16)


def _on_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_what_has_no_kernel() -> None:
    with FakeTensorMode():
        counts = torch.empty(4, dtype=torch.int64, device="cuda")
        assert has_kernel(_on_cuda(3, 8), 8, counts)
        assert not has_kernel(_on_cuda(3, 8, dtype=torch.float32), 8, counts)
        assert not has_kernel(_on_cuda(3, 12), 8, counts)
        assert not has_kernel(_on_cuda(3, 8), 12, counts)
        assert not has_kernel(_on_cuda(0, 8), 8, counts)
        assert not has_kernel(_on_cuda(3, 8), 8, counts.new_empty(expert_ops._MAX_GROUPS + 1))
        assert not has_kernel(torch.empty(3, 8, dtype=torch.bfloat16), 8, counts)
