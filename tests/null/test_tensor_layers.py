"""What one more layer of a model costs in communication where tensors are cut: Megatron's counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import piper
from piper.plan.tasks import Comm
from piper.strategies import parallel
from tests.zoo_hf import HEADS, Tiny, deepseek_v3, gpt2, llama, qwen3

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the traced code changes Python state")


def _counted(tiny: Tiny, **degrees: Any) -> Counter[tuple[str, str]]:
    """The collectives that serve the cut of tensors, forward and backward; what is gathered again for a
    backward is one of it."""
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step).apply(parallel(**degrees))
    plan = program.lower().plan
    assert not plan.gathered, plan.gathered
    stream = [s.name for s in plan.streams].index("tensor")
    (part,) = plan.classes
    found = [task for task in part.tasks if isinstance(task, Comm) and task.stream == stream]
    back = [task.name.startswith("again>") or ">$d." in task.name for task in found]
    return Counter(("FB"[b], t.comm) for b, t in zip(back, found, strict=True))


def _of_one_layer(make: Any, *, layers: int = 1, **degrees: Any) -> dict[tuple[str, str], int]:
    fewer, more = (_counted(make(num), **degrees) for num in (layers, layers + 1))
    more.subtract(fewer)
    return {key: num for key, num in more.items() if num}


MODELS = {
    "gpt2": gpt2,
    "llama": lambda num: llama(num, keys=HEADS),
    "qwen3": lambda num: qwen3(num, keys=HEADS),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_costs_what_it_costs_in_megatron(name: str) -> None:
    assert _of_one_layer(MODELS[name], tp=2) == {("F", "all_reduce"): 2, ("B", "all_reduce"): 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_and_with_sequences_cut(name: str) -> None:
    """What is gathered for a product is gathered again for its weight, instead of being kept."""
    assert _of_one_layer(MODELS[name], tp=2, sp=True) == {
        ("F", "all_gather"): 2,
        ("F", "reduce_scatter"): 2,
        ("B", "all_gather"): 2 + 2,
        ("B", "reduce_scatter"): 2,
    }


@pytest.mark.timeout(300)
def test_latent_attention_costs_one_more_than_the_least() -> None:
    """Forward as any layer. Backward, attention reads three tensors that are equal on all ranks: the
    latents of queries and of keys, and the rotary key. The last two are of one product, whose gradients
    could travel as one."""
    found = _of_one_layer(lambda num: deepseek_v3(num, dense=9), tp=2)
    assert found == {("F", "all_reduce"): 2, ("B", "all_reduce"): 3 + 1}


@pytest.mark.timeout(300)
def test_experts_beside_shared_ones_are_summed_with_them() -> None:
    """One sum forward for both. Backward, gradients of their rows come from two chunks and are summed
    apart, which is one more than the least; beside it the weights of experts, a number per token and
    expert."""
    found = _of_one_layer(lambda num: deepseek_v3(num, dense=1), layers=2, tp=2)
    assert found == {("F", "all_reduce"): 2, ("B", "all_reduce"): 3 + 2 + 1}


def test_fewer_heads_of_keys_than_ranks_stay_whole_and_are_said() -> None:
    tiny = llama()
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step).apply(parallel(tp=2))
    said = "whole: model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight"
    assert said in program.lower().summary()
