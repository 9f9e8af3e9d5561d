"""Losses and norms in float32 under `precision="bf16"`: their values, and training by them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import transformer
from examples import dense, moe_lm
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.compiler import captures
from piper.frontend.capture.capture import Recording, record
from piper.strategies import parallel
from tests.float32_mode import Float32Mode

STEPS = 50


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 8, generator=generator)
    return {"x": x, "y": torch.randint(32, (16,), generator=generator)}


def test_cross_entropy_is_that_of_float32_on_bfloat16_logits() -> None:
    program = piper.trace(lambda: nn.Linear(8, 32), _batch(), _loss)
    with program.lower(precision="bf16").launch("single") as run:
        params = run.parameters()
        found = run.step(_batch()).loss
    logits = F.linear(_batch()["x"].bfloat16(), params["weight"], params["bias"])
    assert logits.dtype == torch.bfloat16
    assert found == F.cross_entropy(logits.float(), _batch()["y"]).item()
    assert found != F.cross_entropy(logits, _batch()["y"]).item()


class ByHand(nn.Module):
    """A norm as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_norm_by_hand_is_that_of_float32() -> None:
    program = piper.trace(ByHand, _batch(), _loss)
    with program.lower(precision="bf16").launch("single") as run:
        [weight] = run.parameters().values()
        found = run.step({**_batch(), "y": _batch()["y"] % 8}).loss
    x = _batch()["x"].bfloat16().float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    assert found == pytest.approx(F.cross_entropy(normed, _batch()["y"] % 8).item(), rel=1e-6)


class Encoder(nn.Module):
    """Norms behind the residual sums, so that stages hand float32 on; a change in place of it."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(2)
        )
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
                x = x.index_add_(1, torch.arange(2), x[:, :2].softmax(-1))
        return self.head(x)


def _encoded(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def _tokens(seed: int) -> Tensor:
    return torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed))


def _encoder(**degrees: Any) -> Job:
    program = piper.trace(Encoder, _tokens(0), _encoded)
    strategy = parallel(**degrees, microbatches=2)
    return program.apply(strategy).lower(precision="bf16", optimizer=piper.adamw(lr=1e-2))


def test_stages_that_hand_on_float32_train_like_one_device() -> None:
    trained = []
    for job in (_encoder(pp=2), _encoder(pp=1)):
        with job.launch("loopback", adversary=True) as run:
            params = run.parameters()
            losses = [run.step(_tokens(seed)).loss for seed in range(4)]
            trained.append((losses, run.evaluate(_tokens(5)).loss, run.masters()))
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    model = Encoder().bfloat16()
    model.load_state_dict(params)
    with Float32Mode():
        wanted = [_encoded(model, rows).item() for rows in _tokens(0).chunk(2)]
    assert trained[0][0][0] == pytest.approx(sum(wanted) / 2, rel=1e-6)


def _benchmark() -> tuple[Any, Any, Any]:
    sizes = transformer.Sizes(16, 4, 2, 32, 32, 8, 4, 2, experts=True)
    model = partial(transformer.Transformer, sizes, 2)
    return model, transformer.make_batch(sizes), transformer.step


def _example() -> tuple[Any, Any, Any]:
    return moe_lm.model, moe_lm.batch(), moe_lm.step


@pytest.mark.parametrize("case", [_benchmark, _example])
def test_values_that_are_cast_before_they_move(case: Any) -> None:
    """Losses and gradients of experts behind norms, in residual streams, are those of eager code."""
    make_model, batch, step = case()
    job = piper.trace(make_model, batch, step).lower(precision="bf16", optimizer=piper.sgd(lr=1.0))
    with job.launch("single") as run:
        model, before = make_model().bfloat16(), run.masters()
        model.load_state_dict(run.parameters())
        found, after = run.step(batch).loss, run.masters()
    with Float32Mode():
        wanted = step(model, batch)
    wanted.backward()
    assert found == wanted.item()
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert torch.equal(after[name], before[name] - param.grad.float()), name


def _curve(precision: str | None) -> list[float]:
    program = piper.trace(dense.model, dense.batch(), dense.step)
    job = program.lower(precision=precision, optimizer=piper.adamw(lr=1e-3))
    with job.launch("single") as run:
        return [run.step(dense.batch(seed % 3)).loss for seed in range(STEPS)]


def _narrow(*program: Any, **options: Any) -> Recording:
    return record(*program, **(options | {"float32_operators": False}))


def test_the_curve_is_nearer_to_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that were bfloat16 numbers lie on a grid; those of float32 do not."""
    wanted, found = _curve(None), _curve("bf16")
    monkeypatch.setattr(captures, "record", _narrow)
    narrow = _curve("bf16")
    assert all(loss == torch.tensor(loss).bfloat16().item() for loss in narrow)
    assert len(set(narrow)) < len(set(found)) == STEPS

    def distance(losses: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(losses, wanted, strict=True)) / STEPS

    assert distance(found) < 0.5 * distance(narrow)


class Unlike(nn.Module):
    """Products that meet a table in float32, as a rotary one is: torch's autocast takes them."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(8, dtype=torch.float32).cos()
        q, k, v = self.q(x) * table, self.k(x) * table, self.v(x)
        if self.product == "attention":
            return self.o(F.scaled_dot_product_attention(q, k, v))
        if self.product == "einsum":
            scores = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
            return self.o(torch.einsum("bij,bjk->bik", scores, v))
        return self.o((q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("product", ["attention", "einsum", "matmul"])
def test_products_take_tensors_of_unlike_dtypes(product: str) -> None:
    batch = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    program = piper.trace(
        lambda: Unlike(product), batch, lambda model, batch: F.mse_loss(model(batch), batch)
    )
    with program.lower(precision="bf16").launch("single") as run:
        model = Unlike(product).bfloat16()
        model.load_state_dict(run.parameters())
        with Float32Mode():
            expected = F.mse_loss(model(batch.bfloat16()), batch.bfloat16())
        assert run.step(batch).loss == pytest.approx(expected.item(), rel=1e-6)


class NotNarrow(Unlike):
    def forward(self, x: Tensor) -> Tensor:
        if self.q.weight.dtype == torch.bfloat16:
            return x.view(7)
        return super().forward(x)


def test_what_fails_under_autocast_too_is_told_as_it_failed_first() -> None:
    program = piper.trace(
        lambda: NotNarrow("matmul"),
        torch.randn(4, 6, 8),
        lambda model, batch: F.mse_loss(model(batch), batch),
    )
    with pytest.raises(piper.errors.TraceError, match=r"shape '\[7\]' is invalid") as caught:
        program.lower(precision="bf16")
    assert "test_float32_losses.py" in str(caught.value)
