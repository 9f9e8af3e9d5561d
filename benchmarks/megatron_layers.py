"""Tensor parallelism by Megatron-core's layers, for peers.py where megatron-core is installed.

The benchmark's transformer with Megatron's products, embedding and loss over a cut vocabulary. Query,
key and value are one product, and so are gate and up, as Megatron has them. With masters the module
computes in bfloat16; its gradients are added to float32 ones that lie one after the other, and the
optimizer updates float32 copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch_variants import Ranked, Step
from transformer import Batch, Sizes


def is_installed() -> bool:
    return find_spec("megatron") is not None


def megatron(ranked: Ranked, regime: str, *, tp: int, sequence: bool) -> Step:
    """Microbatches one after the other on `tp` ranks, and sums over the others."""
    layers = _initialized(tp)
    whole = ranked.whole().state_dict()
    narrow = ranked.device.type == "cuda"
    dtype = torch.bfloat16 if narrow else torch.float32
    config = _config(tp, sequence, dtype)
    model = _Model(ranked.sizes, config, layers, ranked.device, dtype)
    model.fill(whole, dist.get_rank() % tp, tp)
    del whole
    data = dist.get_rank() // tp
    num, rows = ranked.sizes.microbatches * tp // ranked.num_ranks, ranked.sizes.rows
    wide = regime == "masters"
    updated = _Masters(model, ranked) if wide else _Plain(model, ranked)
    norms = [updated.gradient(p) for n, p in model.named_parameters() if "norm" in n]

    def one(batch: Batch) -> float:
        total = torch.zeros((), device=ranked.device)
        for m in range(num):
            first = (data * num + m) * rows
            tokens, labels = (batch[k][first : first + rows] for k in ("tokens", "labels"))
            loss = model(tokens, labels) / num
            loss.backward()
            total += loss.detach()
        if sequence:  # each rank has seen its part of the sequence
            for grad in norms:
                dist.all_reduce(grad(), group=layers.state.get_tensor_model_parallel_group())
        if ranked.num_ranks > tp:
            for grad in updated.sums():
                grad /= ranked.num_ranks // tp
                dist.all_reduce(grad, group=layers.state.get_data_parallel_group())
        updated.step()
        return float(total)

    return one


class _Layers:
    """What is taken from Megatron-core."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of what it would rather have: Apex, Transformer Engine
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.model_parallel_config import ModelParallelConfig
        self.state, self.of, self.config = parallel_state, tensor_parallel, ModelParallelConfig


def _initialized(tp: int) -> _Layers:
    found = _Layers()
    if found.state.model_parallel_is_initialized():
        found.state.destroy_model_parallel()
    found.state.initialize_model_parallel(
        tensor_model_parallel_size=tp, create_gloo_process_groups=False
    )
    return found


def _config(tp: int, sequence: bool, dtype: torch.dtype) -> Any:
    return _Layers().config(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence,
        params_dtype=dtype,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,  # its kernels come with Apex
    )


class _Model(nn.Module):
    """Sequences are dim 0, as Megatron cuts them."""

    def __init__(
        self, sizes: Sizes, config: Any, layers: _Layers, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.of = layers.of
        self.embed = layers.of.VocabParallelEmbedding(
            sizes.vocabulary, sizes.width, init_method=_nothing, config=config,
            reduce_scatter_embeddings=config.sequence_parallel,
        )  # fmt: skip
        self.layers = nn.ModuleList(_Layer(sizes, config, layers) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = _columns(sizes.width, sizes.vocabulary, config, layers)
        self.to(device=device, dtype=dtype)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        if not self.embed.reduce_scatter_embeddings:  # which has turned it already
            x = x.transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        logits, _ = self.head(self.norm(x))
        losses: Tensor = self.of.vocab_parallel_cross_entropy(
            logits.float(), labels.transpose(0, 1).contiguous()
        )
        return losses.mean()

    @torch.no_grad()
    def fill(self, whole: dict[str, Tensor], part: int, parts: int) -> None:
        """This rank's part of the whole weights."""
        of = lambda name, dim: whole[f"{name}.weight"].chunk(parts, dim)[part]  # noqa: E731
        self.embed.weight.copy_(of("embed", 0))
        self.head.weight.copy_(of("head", 0))
        self._fill_norm(self.norm, whole, "norm")
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            name = f"layers.{number}"
            for norm in ("norm1", "norm2"):
                self._fill_norm(getattr(layer, norm), whole, f"{name}.{norm}")
            joined = [of(f"{name}.attention.{each}", 0) for each in ("q", "k", "v")]
            layer.qkv.weight.copy_(torch.cat(joined))
            layer.out.weight.copy_(of(f"{name}.attention.out", 1))
            joined = [of(f"{name}.feed.{each}", 0) for each in ("gate", "up")]
            layer.gate_up.weight.copy_(torch.cat(joined))
            layer.down.weight.copy_(of(f"{name}.feed.down", 1))

    def _fill_norm(self, norm: nn.Module, whole: dict[str, Tensor], name: str) -> None:
        for key, param in norm.named_parameters():
            param.copy_(whole[f"{name}.{key}"])


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes, config: Any, layers: _Layers) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.size = width // sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = _columns(width, 3 * width, config, layers)
        self.out = _rows(width, width, config, layers)
        self.gate_up = _columns(width, 2 * hidden, config, layers)
        self.down = _rows(hidden, width, config, layers)

    def forward(self, x: Tensor) -> Tensor:
        fused, _ = self.qkv(self.norm1(x))
        length, batch, _ = fused.shape
        q, k, v = (t.unflatten(-1, (-1, self.size)).permute(1, 2, 0, 3) for t in fused.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, _ = self.out(y.permute(2, 0, 1, 3).reshape(length, batch, -1))
        x = x + y
        gate, up = self.gate_up(self.norm2(x))[0].chunk(2, -1)
        y, _ = self.down(F.silu(gate) * up)
        return x + y


def _columns(size: int, made: int, config: Any, layers: _Layers) -> Any:
    return layers.of.ColumnParallelLinear(
        size, made, config=config, init_method=_nothing, bias=False
    )


def _rows(size: int, made: int, config: Any, layers: _Layers) -> Any:
    return layers.of.RowParallelLinear(
        size, made, config=config, init_method=_nothing, bias=False, input_is_parallel=True,
        skip_bias_add=False,
    )  # fmt: skip


def _nothing(_: Tensor) -> None:
    """Weights are filled in later."""


class _Plain:
    """The optimizer on the module's own parameters."""

    def __init__(self, model: nn.Module, ranked: Ranked) -> None:
        self.params = list(model.parameters())
        self.optimizer = ranked.optimizer(self.params)

    def gradient(self, param: nn.Parameter) -> Any:
        return lambda: param.grad

    def sums(self) -> Sequence[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class _Masters:
    """Float32 copies of parameters, with float32 gradients in one tensor."""

    def __init__(self, model: nn.Module, ranked: Ranked) -> None:
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.whole = torch.zeros(sum(p.numel() for p in self.params), device=ranked.device)
        parts = self.whole.split([p.numel() for p in self.params])
        for param, master, part in zip(self.params, self.masters, parts, strict=True):
            master.grad = part.view(param.shape)
            param.register_post_accumulate_grad_hook(_adding(master.grad))
        self.optimizer = ranked.optimizer(self.masters)
        self._grad_of = {id(p): m for p, m in zip(self.params, self.masters, strict=True)}

    def gradient(self, param: nn.Parameter) -> Any:
        return lambda: self._grad_of[id(param)].grad

    def sums(self) -> Sequence[Tensor]:
        return [self.whole]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.whole.zero_()
        torch._foreach_copy_(self.params, self.masters)


def _adding(total: Tensor) -> Any:
    def add(param: Tensor) -> None:
        assert param.grad is not None
        total.add_(param.grad)
        param.grad = None

    return add
