"""Rows sorted by expert, taken and put back: as plain indexing does it, in few kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import piper
from piper.bodies.row_ops import expert_places, put_rows, sort_experts, take_rows

NO_KERNEL = {"empty", "empty_like", "new_empty", "detach", "item", "_unsafe_view"}


class Operators(TorchDispatchMode):
    """Counts what would be kernels, inside of our own operators too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "piper":
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        name = name.removeprefix("aten::")
        if not func.is_view and name not in NO_KERNEL:
            self.seen[name] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("experts", [[2, 0, 2, 1, 0, 2], [4, 4, 4], [0], []], ids=str)
def test_sorting(experts: list[int]) -> None:
    expert = torch.tensor(experts, dtype=torch.int64)
    order, counts = sort_experts(expert, 5)
    assert torch.equal(order, expert.argsort(stable=True))
    assert torch.equal(counts, expert.bincount(minlength=5))


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_expert_that_is_not_there(wrong: int) -> None:
    with pytest.raises(IndexError, match="of 5"):
        sort_experts(torch.tensor([0, wrong, 3]), 5)


@pytest.mark.parametrize(
    "received",
    [[[1, 2], [3, 0]], [[0, 0], [0, 4]], [[2], [1]], [[1, 0, 2]], [[0, 0], [0, 0]]],
    ids=str,
)
def test_places_group_by_expert_what_came_by_sender(received: list[list[int]]) -> None:
    counts = torch.tensor(received)
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    expert = experts.repeat_interleave(counts.flatten())
    places = expert_places(counts, len(expert))
    assert torch.equal(places, expert.argsort(stable=True).argsort())


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_taken_rows_and_their_gradients(copies: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(6 * copies)
    results = (take_rows(x, order, copies), x[order // copies])
    tangent = torch.randn(6 * copies, 5, dtype=torch.float64)
    mine, other = (torch.autograd.grad(result, x, tangent)[0] for result in results)
    assert torch.equal(*results)
    torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14)
    torch.library.opcheck(take_rows, (x, order, copies))


def test_put_rows_undoes_a_permutation() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(7)
    assert torch.equal(put_rows(take_rows(x, order, 1), order), x)
    tangent = torch.randn(7, 5, dtype=torch.float64)
    [grad] = torch.autograd.grad(put_rows(x, order), x, tangent)
    assert torch.equal(grad, tangent[order])
    torch.library.opcheck(put_rows, (x, order))


@pytest.mark.parametrize("copies", [1, 2])
def test_operators_of_a_mixture(copies: int) -> None:
    """One sort, no atomics, and no sum of copies where each row has one expert."""
    x = torch.randn(16, 8, requires_grad=True)
    weights = torch.rand(16, copies, requires_grad=True)
    chosen = torch.rand(16, 4).topk(copies).indices
    with Operators() as forward:
        made = piper.mixture(_nothing, x, chosen, weights, num_experts=4)
    tangent = torch.randn_like(made)
    with Operators() as backward:
        torch.autograd.grad(made, (x, weights), tangent)
    routing = {"sort": 1, "arange": 1, "searchsorted": 1, "diff": 1}
    check = {"sum": 1}  # that all experts exist, on the CPU alone
    moves = {"index_select": 1, "index_copy_": 1}
    weighing = {"mul": 1, "floor_divide": copies - 1, "sum": copies - 1}
    assert forward.seen == _sum(routing, check, moves, weighing)
    assert backward.seen == _sum(moves, {"mul": 2, "sum": 1}, {"sum": copies - 1})


def _nothing(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.view_as(rows)


def _sum(*numbers: dict[str, int]) -> Counter[str]:
    return sum(map(Counter, numbers), Counter())


def test_the_host_never_waits_on_cuda() -> None:
    """Fake tensors refuse to say what they hold."""
    with FakeTensorMode():
        expert = torch.empty(16, dtype=torch.int64, device="cuda")
        order, counts = sort_experts._init_fn(expert, 4)
        places = expert_places._init_fn(counts.view(2, 2), 16)
        rows = torch.empty(8, 4, device="cuda")
        taken = put_rows._init_fn(take_rows._init_fn(rows, order, 2), places)
    assert taken.shape == (16, 4) and order.shape == places.shape == (16,)
