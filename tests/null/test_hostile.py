"""Models that cannot be traced: each is refused by one error with the user's line and a way out."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention

import piper
from piper.api.program import Program
from piper.bodies import store
from piper.strategies import parallel

Forward = Callable[[Any, Tensor], Any]
HOSTILE: dict[str, tuple[Forward, str]] = {}  # forward, and words of the way out
GENERATOR = torch.Generator()
CAUSAL = (lambda b, h, q, k: q >= k, 1, 1, 6, 6, "cpu")


def hostile(way_out: str) -> Callable[[Forward], Forward]:
    def note(forward: Forward) -> Forward:
        HOSTILE[forward.__name__] = forward, way_out
        return forward

    return note


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layerdrop = 0.5
        self.register_buffer("count", torch.zeros(6, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6, 6, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@hostile("torch.bmm")
def vmap(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(self.b)(self.a(x))


@hostile("written out")
def func_grad(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.func.grad(lambda y: (y**2).sum())(self.a(x)))


@hostile("layerdrop=0")
def layer_drop(self: Any, x: Tensor) -> Tensor:
    dropout_probability = torch.rand([])
    if dropout_probability < self.layerdrop:
        return self.a(x)
    return self.b(self.a(x))


@hostile("torch.rand")
def host_random(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * random.random()


@hostile("torch.rand")
def host_choice(self: Any, x: Tensor) -> Tensor:
    return self.a(x) if random.uniform(0, 1) < 0.5 else self.b(x)


@hostile("torch.rand")
def numpy_random(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * np.random.beta(1.0, 1.0)


@hostile("lower(seed=...)")
def seed(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(self.a(x))


@hostile("lower(seed=...)")
def generator(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * torch.rand(6, generator=GENERATOR)


@hostile("clock")
def clock(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * time.time()


@hostile("piper.mixture(")
def loop_over_experts(self: Any, x: Tensor) -> Tensor:
    chosen = self.a(x).argmax(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        (rows,) = torch.where(chosen == index)
        out[rows] = expert(x[rows])
    return out


@hostile("torch.where")
def branch(self: Any, x: Tensor) -> Tensor:
    return self.a(x) if x.sum() > 0 else self.b(x)


@hostile("no .item()")
def number(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * x.mean().item()


@hostile("no .item()")
def numbers(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * x[0].tolist()[0]


@hostile("known from the batch's shape")
def nonzero(self: Any, x: Tensor) -> Tensor:
    return self.a(x)[(x.sum(1) > 0).nonzero().squeeze(1)]


@hostile("dense tensors")
def sparse(self: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(self.a(x).to_sparse(), self.b.weight)


@hostile("sparse=False")
def sparse_gradient(self: Any, x: Tensor) -> Tensor:
    return F.embedding((x > 0).long(), self.a.weight, sparse=True)


@hostile("sparse=False")
def sparse_bag(self: Any, x: Tensor) -> Tensor:
    return F.embedding_bag((x > 0).long(), self.a.weight, sparse=True)


@hostile("sparse=False")
def sparse_gradient_of_the_operator(self: Any, x: Tensor) -> Tensor:
    return torch.embedding(self.a.weight, (x > 0).long(), -1, False, True)


@hostile("sparse_grad=False")
def sparse_gather(self: Any, x: Tensor) -> Tensor:
    return torch.gather(self.a(x), 1, (x > 0).long(), sparse_grad=True)


@hostile("sparse_grad=False")
def sparse_gather_by_the_method(self: Any, x: Tensor) -> Tensor:
    return self.a(x).gather(1, (x > 0).long(), sparse_grad=True)


@hostile("create_block_mask")
def mask_by_vmap(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * flex_attention.create_mask(*CAUSAL)[0, 0].sum(0)


@hostile("create_block_mask")
def mask_added_to_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    view = y[0]
    view += flex_attention.create_mask(*CAUSAL)[0, 0].sum(0)
    return y


@hostile("create_block_mask")
def mask_added_by_an_overload(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    torch.ops.aten.add_.Tensor(y, flex_attention.create_mask(*CAUSAL)[0, 0].sum(0))
    return y


@hostile("create_block_mask")
def mask_as_out(self: Any, x: Tensor) -> Tensor:
    y = torch.empty(6, 6)
    mask = flex_attention.create_mask(*CAUSAL)[0, 0].float()
    torch.add(mask, mask, out=y)
    return self.a(x) @ y


@hostile("create_block_mask")
def mask_in_a_counter(self: Any, x: Tensor) -> Tensor:
    self.count += flex_attention.create_mask(*CAUSAL)[0, 0].sum(0)
    return self.a(x)


@hostile("create_block_mask")
def mask_as_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.seen = flex_attention.create_mask(*CAUSAL)[0, 0]
    return self.a(x)


@hostile("create_block_mask")
def mask_in_a_norm(self: Any, x: Tensor) -> Tensor:
    F.batch_norm(
        flex_attention.create_mask(*CAUSAL)[0, 0].float(), self.mean, self.var, training=True
    )
    return self.a(x)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * flex_attention.create_mask(*CAUSAL)[0, 0].sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@hostile("create_block_mask")
def mask_in_a_function(self: Any, x: Tensor) -> Tensor:
    return _Masked.apply(self.a(x))


@hostile("mask")
def nested(self: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([self.a(x)[0], self.b(x)[1]]).to_padded_tensor(0.0)


@hostile("padded batch")
def packed(self: Any, x: Tensor) -> Tensor:
    lengths = torch.ones(len(x), dtype=torch.int64)
    rows = nn.utils.rnn.pack_padded_sequence(self.a(x)[:, None], lengths, batch_first=True)
    return rows.data


@hostile("lower(device=...)")
def device(self: Any, x: Tensor) -> Tensor:
    return self.a(x.to("meta"))


@hostile("no .item()")
def split_sizes(self: Any, x: Tensor) -> Tensor:
    some = int((x > 0).sum())
    return torch.cat(self.a(x).flatten().split([some, x.numel() - some]))


@hostile("code that torch.compile(fullgraph=True) accepts")
def without_end(self: Any, x: Tensor) -> Tensor:
    return without_end(self, x)


@hostile("what the batch has: x float32[4, 6]")
def mismatch(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x)[:, :3])


@hostile("what the batch has: x float32[4, 6]")
def own_error(self: Any, x: Tensor) -> Tensor:
    raise KeyError("nothing")


@hostile("code that torch.compile(fullgraph=True) accepts")
def end(self: Any, x: Tensor) -> Tensor:
    sys.exit(3)


def _trace(forward: Forward) -> Program:
    batch = {"x": torch.randn(4, 6)}
    return piper.trace(lambda: Model(forward), batch, lambda model, batch: model(batch["x"]).mean())


@pytest.mark.parametrize("name", HOSTILE)
def test_one_error_with_a_line_and_a_way_out(name: str) -> None:
    forward, way_out = HOSTILE[name]
    with pytest.raises(piper.PiperError) as caught:
        _trace(forward)
    code = forward.__code__
    lines = range(code.co_firstlineno, max(n for *_, n in code.co_lines() if n) + 1)
    assert any(f"test_hostile.py:{line}" in str(caught.value) for line in lines), caught.value
    assert way_out in (caught.value.legal or ""), caught.value


def test_what_was_refused_leaves_nothing_behind() -> None:
    for name in ("vmap", "func_grad", "without_end"):
        with pytest.raises(piper.PiperError):
            _trace(HOSTILE[name][0])
    torch.rand(3)  # inside of vmap it would raise
    _trace(lambda self, x: self.b(self.a(x)))


@torch.library.custom_op("hostile::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return x * 2


_twice.register_fake(torch.empty_like)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad[:, :2]


def no_derivative(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.igamma(self.a(x).abs(), x.abs()))


def no_formula(self: Any, x: Tensor) -> Tensor:
    return self.b(_twice(self.a(x)))


def wrong_shape(self: Any, x: Tensor) -> Tensor:
    return self.b(_Cut.apply(self.a(x)))


def saved_and_changed(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).exp()
    z = self.b(y)
    y.add_(1)
    return y * z


BACKWARDS = {
    no_derivative: (1, "the backward of igamma fails", "x.detach()"),
    no_formula: (1, "the backward of twice.default fails", "register_autograd"),
    wrong_shape: (1, "the backward of autograd.Function fails", "x.detach()"),
    saved_and_changed: (3, "add_", "x = x + y"),
}


@pytest.mark.parametrize("forward", BACKWARDS, ids=lambda forward: forward.__name__)
def test_a_backward_that_cannot_be_made(forward: Forward) -> None:
    """Torch refuses it when bodies are made, long after the trace."""
    line, words, way_out = BACKWARDS[forward]
    with pytest.raises(piper.PiperError) as caught:
        program = _trace(forward)
        program.apply(parallel(dp=2)).lower(optimizer=piper.sgd(lr=0.1))
    place = f"test_hostile.py:{forward.__code__.co_firstlineno + line}"
    assert words in str(caught.value) and place in str(caught.value), caught.value
    assert way_out in (caught.value.legal or ""), caught.value


class _Marked(Tensor):
    pass


def test_what_torch_raises_in_make_model_has_the_users_line() -> None:
    def make_model() -> nn.Module:
        model = nn.Linear(6, 6)
        model.bias = nn.Parameter(torch.ones(6).as_subclass(_Marked))
        return model

    with pytest.raises(piper.PiperError) as caught:
        piper.trace(make_model, {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"]))
    line = make_model.__code__.co_firstlineno + 2
    assert f"make_model fails at tests/null/test_hostile.py:{line}" in str(caught.value)
    assert "made by operators" in (caught.value.legal or "")


def test_an_error_without_words_in_make_model_has_the_users_line() -> None:
    def make_model() -> nn.Module:
        torch.distributions.Bernoulli(torch.tensor(0.5), validate_args=False).rsample()
        return nn.Linear(6, 6)

    with pytest.raises(piper.PiperError) as caught:
        piper.trace(make_model, {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"]))
    line = make_model.__code__.co_firstlineno + 1
    assert f"test_hostile.py:{line}: NotImplementedError: no reason" in str(caught.value)


def test_a_failure_of_pipers_own_is_not_told_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("of ours")

    monkeypatch.setattr(store, "partition", fail)
    program = _trace(lambda self, x: self.b(self.a(x)))
    with pytest.raises(KeyError, match="of ours"):
        program.lower()


def test_errors_of_make_models_own_stay_as_they_are() -> None:
    def make_model() -> nn.Module:
        raise KeyError("width")

    with pytest.raises(KeyError, match="width"):
        piper.trace(make_model, {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"]))


def test_make_model_returns_a_module() -> None:
    make_model: Any = lambda: 3  # noqa: E731
    with pytest.raises(piper.PiperError, match=r"test_hostile.py:\d+\): make_model returns int"):
        piper.trace(make_model, {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"]))
