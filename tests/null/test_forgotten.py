"""What a step does beside its loss and gradients, and a plan would forget: refused, with the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.errors import TraceError
from tests.loopback.programs import mean_square, random_batch


class _Model(nn.Module):
    """Two layers and a buffer; `forward` and `prepare` are the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mean = nn.Linear(6, 6), nn.Linear(6, 6), nn.Buffer(torch.zeros(6))
        self.prepare()

    def prepare(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def _trace(**methods: Callable[..., Any]) -> piper.Program:
    model = type("Model", (_Model,), methods)
    return piper.trace(lambda: model().double(), random_batch(0), mean_square)


def _refused(words: str, at: Callable[..., Any], **methods: Callable[..., Any]) -> None:
    """`words` are said, with a line of `at`."""
    with pytest.raises(TraceError, match=words) as error:
        _trace(**methods)
    lines, first = inspect.getsourcelines(at)
    places = [f"test_forgotten.py:{line})" for line in range(first, first + len(lines))]
    assert any(place in error.value.message for place in places), error.value.message
    assert error.value.legal


def _no_grad(model: _Model, y: Tensor) -> None:
    with torch.no_grad():
        model.a.weight.mul_(0.9)


def _foreach(model: _Model, y: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(model.b.parameters()), list(model.a.parameters()), 0.1)


def _data(model: _Model, y: Tensor) -> None:
    model.a.weight.data.mul_(0.9)


def _new_data(model: _Model, y: Tensor) -> None:
    model.a.weight.data = model.a.weight.data * 0.9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_grad, "parameter a.weight of Linear a is changed in place"),
        (_foreach, "parameter b.* of Linear b is changed in place"),
        (_data, "parameter a.weight of Linear a is changed in place"),
        (_new_data, "parameter a.weight of Linear a is changed in place"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_change_that_nothing_reads_is_refused(
    change: Callable[[_Model, Tensor], None], words: str, dropout: float
) -> None:
    def forward(self: _Model, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(F.dropout(self.a(x), dropout)))
        change(self, y)
        return y

    _refused(words, change, forward=forward)


def test_a_target_network_is_refused() -> None:
    def prepare(self: _Model) -> None:
        self.b.requires_grad_(False)

    def forward(self: _Model, x: Tensor) -> Tensor:
        result = self.a(x) - self.b(x)
        for mine, other in zip(self.a.parameters(), self.b.parameters(), strict=True):
            other.data.mul_(0.99).add_(mine.data, alpha=0.01)
        return result

    _refused(
        "parameter b.weight of Linear b is changed in place",
        forward,
        forward=forward,
        prepare=prepare,
    )


def test_a_changed_batch_is_refused() -> None:
    def forward(self: _Model, x: Tensor) -> Tensor:
        y = self.a(x * 1)
        x.mul_(2)
        return y

    _refused("is changed in place", forward, forward=forward)


def test_tensors_that_are_put_back_are_no_change() -> None:
    def forward(self: _Model, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = self.mean + 1
        x = self.a(x) + self.mean
        self.mean = before
        halves = {"weight": self.b.weight / 2, "bias": self.b.bias}
        return torch.func.functional_call(self.b, halves, (x,))

    assert _trace(forward=forward).source.captured(8).state == ()


def _twice(grad: Tensor) -> Tensor:
    return grad * 2


def _on_parameter(self: _Model) -> None:
    self.a.weight.register_hook(_twice)


def _after_accumulation(self: _Model) -> None:
    self.a.weight.register_post_accumulate_grad_hook(lambda param: None)


def _on_module(self: _Model) -> None:
    self.a.register_full_backward_hook(lambda module, before, after: None)


def _before_module(self: _Model) -> None:
    self.a.register_full_backward_pre_hook(lambda module, grads: None)


def _on_several(self: _Model) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(self.parameters()), lambda grads: None)


@pytest.mark.parametrize(
    "prepare", [_on_parameter, _after_accumulation, _on_module, _before_module, _on_several]
)
def test_a_hook_is_refused_where_it_is_registered(prepare: Callable[..., Any]) -> None:
    _refused(r"make_model calls register_\w*hook", prepare, prepare=prepare)


def test_a_hook_in_forward_is_refused() -> None:
    def forward(self: _Model, x: Tensor) -> Tensor:
        self.a.weight.register_hook(_twice)
        return self.a(x)

    _refused("the traced code calls register_hook", forward, forward=forward)


def test_a_hook_that_came_another_way_is_named_by_its_function() -> None:
    def prepare(self: _Model) -> None:
        self._backward_hooks[0] = _twice

    _refused("module Model has a hook for its backward", _twice, prepare=prepare)
    handle = nn.modules.module.register_module_full_backward_hook(_on_all)
    try:
        _refused("every module has a hook for its backward", _on_all)
    finally:
        handle.remove()


def _on_all(module: nn.Module, before: Any, after: Any) -> None:
    return None


def test_forward_hooks_are_traced() -> None:
    def prepare(self: _Model) -> None:
        self.a.register_forward_hook(lambda module, args, result: result * 2)

    graph = _trace(prepare=prepare).source.captured(8).graph
    assert any("mul" in str(node.target) for node in graph.nodes)


def test_inference_mode_is_refused() -> None:
    def forward(self: _Model, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        return self.a(x) + y

    with pytest.raises(TraceError, match="inference_mode is not supported"):
        _trace(forward=forward)
