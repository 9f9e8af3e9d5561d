"""Hugging Face's experts: modules that take any implementation of theirs are given ours while traced.

transformers keeps a table of functions that compute what an experts module computes, and its modules
look one up by `config._experts_implementation` at each call. Those of transformers loop over experts
as the data says, or call kernels that trace in bfloat16 only. transformers is never imported here: a
program that has not imported it has no such module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from piper.bodies.expert_ops import grouped_mm
from piper.frontend.annotate import untag
from piper.frontend.mixture import EXPERTS, mixture

_TABLE = "transformers.integrations.moe"
_NAME = "piper"
_CHOICE = "_experts_implementation_internal"  # `_experts_implementation` checks what it is set to
# What transformers' decorator gives to a module that asks the table.
_MARKS = ("has_gate", "has_bias", "is_transposed")


@contextlib.contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """While a model is traced: its experts are regions EP=0, 1, ... of the form that can be sharded."""
    experts = _experts_of(model)
    untag(model, EXPERTS, experts)
    with contextlib.ExitStack() as stack:
        if experts:
            table = sys.modules[_TABLE].ALL_EXPERTS_FUNCTIONS
            table.register(_NAME, _forward)
            stack.callback(table._global_mapping.pop, _NAME)
            stack.enter_context(_implementation(experts.values(), _NAME))
        yield


@contextlib.contextmanager
def own_experts(model: nn.Module) -> Iterator[None]:
    """While a model is a reference: its experts compute by their class's own code, in any dtype."""
    with _implementation(_experts_of(model).values(), "eager"):
        yield


@contextlib.contextmanager
def _implementation(experts: Iterable[Any], name: str) -> Iterator[None]:
    """While these modules look up this function; a configuration may be the user's own object."""
    configs = {id(module.config): module.config for module in experts}
    chosen = [(config, getattr(config, _CHOICE, None)) for config in configs.values()]
    try:
        for config, _ in chosen:
            setattr(config, _CHOICE, name)
        yield
    finally:
        for config, choice in chosen:
            setattr(config, _CHOICE, choice)


def _experts_of(model: nn.Module) -> dict[str, Any]:
    """By path, the modules that ask transformers' table."""
    if _TABLE not in sys.modules:
        return {}
    return {path: module for path, module in model.named_modules() if _asks_the_table(module)}


def _asks_the_table(module: nn.Module) -> bool:
    return hasattr(module, "config") and all(hasattr(module, mark) for mark in _MARKS)


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What an experts module gives for rows `hidden` [N, d], of which each goes to its k experts
    `chosen` [N, k] and counts `weights` [N, k] there."""

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        rows = rows.to(getattr(module, up).dtype)
        ones = torch.ones_like(rows[:, :1]) if module.has_bias else None
        rows = _linear(module, up, rows, counts, ones)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        return _linear(module, "down_proj", rows, counts, ones)

    after = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return mixture(experts, hidden, chosen, weights, num_experts=module.num_experts, after=after)


def _linear(module: Any, name: str, rows: Tensor, counts: Tensor, ones: Tensor | None) -> Tensor:
    """Of rows; with `ones`, a number per row, there are biases."""
    weight = getattr(module, name)
    result = grouped_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), counts)
    if ones is not None:
        bias = getattr(module, f"{name}_bias").unsqueeze(1)
        result = result + grouped_mm(ones, bias, counts)
    return result
