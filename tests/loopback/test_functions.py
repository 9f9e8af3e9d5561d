"""autograd.Function: chunks differentiate by the user's backward, exactly as one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device

STRATEGIES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "microbatches": 2},
    "dp2": {"dp": 2, "microbatches": 2},
    "zero3": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2},
    "halves": {"pp": 2, "microbatches": 4, "schedule": "zb_h1"},
    "recompute": {"pp": 2, "microbatches": 2, "recompute": "nothing"},
}


class Rounded(torch.autograd.Function):
    """A straight-through estimator: attributes of ctx, what needs a gradient, a mask without one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: float) -> tuple[Tensor, Tensor]:
        inside = x.abs() < 1
        ctx.save_for_backward(inside)
        ctx.steps = steps
        ctx.mark_non_differentiable(inside)
        return torch.round(x * steps) / steps, inside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (inside,) = ctx.saved_tensors
        # Not what autograd would make of anything: 0.3 shows whose backward it is.
        return (grads[0] * inside + 0.3 / ctx.steps) if ctx.needs_input_grad[0] else None, None


class TwoResults(torch.autograd.Function):
    """A product and a norm of its factors, whose gradients come together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x.pow(2).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        product, norm = grads
        x, weight = ctx.saved_tensors
        return product @ weight.T + 3.0 * x * norm[..., None], x.T @ product


class FusedLoss(torch.autograd.Function):
    """A loss whose forward already computes the gradients, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight.T
        error = torch.softmax(logits, -1)
        loss = F.cross_entropy(logits, labels)
        error = (error - F.one_hot(labels, weight.shape[0]).to(x.dtype)) / x.shape[0]
        ctx.save_for_backward(error @ weight, error.T @ x)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grads[0] * x, grads[0] * weight, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x, inside = Rounded.apply(torch.tanh(layer(x)), 8.0)
                x = x * (1.0 + inside)
                if index == 1:
                    x, norm = TwoResults.apply(x, self.weight)
                    x = x + 0.1 * norm[:, None]
                    x = FusedLoss.apply(x, self.head, labels)
        return x


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(16, 6, dtype=torch.float64), "y": torch.randint(0, 5, (16,))}


def _step(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"], batch["y"])


def _assert_exact(
    make_model: Callable[[], nn.Module], strategy: Any, step: Any = _step, batch: Any = _batch
) -> Program:
    torch.manual_seed(0)
    batches = [batch() for _ in range(2)]
    program = piper.trace(make_model, batches[0], step)
    job = program.apply(parallel(**strategy)).lower(optimizer=piper.adamw(lr=1e-3))
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors
    return program


class Sized(torch.autograd.Function):
    """Sizes, and a device, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.reshape(-1) * torch.ones(x.shape[0] * x.shape[1], dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rows = torch.arange(ctx.shape[0], dtype=grads[0].dtype, device=grads[0].device)
        return grads[0].view(ctx.shape) + 0.01 * rows[:, None]


class Dropped(torch.autograd.Function):
    """Random numbers of the forward that the backward uses again, kept on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) > 0.3
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0] * ctx.mask


class Itself(torch.autograd.Function):
    """The input is the result; only its gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2.0)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3.0 * grads[0]


class SetUp(torch.autograd.Function):
    """The newer form, and a function inside of a function's backward."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return Itself.apply(grads[0]) * ctx.factor + 0.1 * output, None


class OneOfTwo(torch.autograd.Function):
    """Gradients that are not there are None, in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * weight, 2.0 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        product, double = grads
        if product is None:
            return None, None
        weight = (product * ctx.saved_tensors[0]).sum(0)
        return None, weight if double is None else weight + double.sum(0)


class Kinds(nn.Module):
    def __init__(self, forward: Callable[[Kinds, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(6))
        self.forward_of = forward

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = self.forward_of(self, torch.tanh(layer(x)))
        return x.pow(2).mean()


def _many(model: Kinds, x: Tensor) -> Tensor:
    x = Dropped.apply(Sized.apply(x).view(x.shape))
    x = InPlace.apply(Itself.apply(x) * 1.0)
    with torch.no_grad():
        still = SetUp.apply(x, 2.0)
    return SetUp.apply(x, 3.0) + still


def test_kinds_of_functions() -> None:
    _assert_exact(lambda: Kinds(_many).double(), STRATEGIES["zero3"])


def test_an_input_without_gradient_ends_the_flow() -> None:
    """The first layer has none at all, so that no optimizer touches it."""
    program = _assert_exact(
        lambda: Kinds(lambda model, x: OneOfTwo.apply(x, model.weight)[0]).double(),
        {"pp": 2, "dp": 2, "microbatches": 2},
    )
    trained = {name for name, value in program.graph.values.items() if value.role == "param_grad"}
    assert trained and all("weight" in n and "layers" not in n for n in trained), trained


class Numbers(nn.Module):
    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in numbers)
        self.numbers = numbers

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer, number in zip(self.layers, self.numbers, strict=True):
            with piper.annotate("PP"):
                x = SetUp.apply(layer(x), number)
        return x.pow(2).mean()


def test_equal_functions_share_bodies() -> None:
    """A number inside of a function makes it another one."""

    def num_bodies(numbers: list[float]) -> int:
        program = piper.trace(lambda: Numbers(numbers).double(), _batch(), _step)
        job = program.apply(parallel(microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
        return len(job.bodies)

    assert num_bodies([2.0, 2.0, 2.0, 2.0]) == num_bodies([2.0, 2.0, 2.0])
    assert num_bodies([2.0, 2.0, 3.0, 2.0]) > num_bodies([2.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_users_backward_is_taken(name: str) -> None:
    _assert_exact(lambda: Model().double(), STRATEGIES[name])
