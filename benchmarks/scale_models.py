"""Shapes of large mixtures of experts: a name in, transformers' model and arithmetic about it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

LENGTH = 4096  # tokens of a sequence
LABELS = {"qwen3": "Qwen3-235B-A22B", "deepseek": "DeepSeek-V3"}


@dataclass(frozen=True)
class Shape:
    """A class of transformers with its configuration, and the dims that `flops_by_hand` needs: of
    attention, rows and columns of each matrix, and elements of a query and of a value in all heads."""

    model: str
    config: str
    sizes: dict[str, Any] = field(repr=False)
    matrices: tuple[tuple[int, int], ...]
    query: int
    value: int
    length: int = LENGTH

    def make(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(
            use_cache=False, max_position_embeddings=self.length, **self.sizes
        )
        return getattr(transformers, self.model)(config)

    def flops_by_hand(self, tokens: int) -> float:
        """Of matrix products in a step on so many tokens: two a weight and token forward, twice that
        backward; attention over whole sequences, as torch's counter has it, not over the past alone."""
        sizes = self.sizes
        width, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        dense = sizes.get("first_k_dense_replace", 0)
        experts = sizes.get("n_routed_experts") or sizes["num_experts"]
        chosen = sizes["num_experts_per_tok"] + sizes.get("n_shared_experts", 0)
        of_expert = 3 * width * sizes["moe_intermediate_size"]
        weights = layers * sum(rows * columns for rows, columns in self.matrices)
        weights += (layers - dense) * (chosen * of_expert + width * experts)
        weights += dense * 3 * width * sizes["intermediate_size"]
        weights += width * sizes["vocab_size"]  # the head; looking up is no product
        scores = layers * self.length * (self.query + self.value)
        return 6.0 * (weights + scores) * tokens


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def qwen3(
    *, layers: int = 94, width: int = 4096, experts: int = 128, length: int = LENGTH
) -> Shape:
    """Qwen3-235B-A22B, or one of its shape with fewer layers, and narrower."""
    heads, keys, head, inner = width // 64, max(1, width // 1024), 128, width * 3 // 8
    vocabulary = 151936 if width == 4096 else 8 * width
    sizes = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width,
        "moe_intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": head,
        "num_experts": experts, "num_experts_per_tok": min(8, experts), "norm_topk_prob": True,
    }  # fmt: skip
    q, kv = heads * head, keys * head
    matrices = ((width, q), (width, kv), (width, kv), (q, width))
    return Shape("Qwen3MoeForCausalLM", "Qwen3MoeConfig", sizes, matrices, q, q, length)


def deepseek() -> Shape:
    """DeepSeek-V3, without its module that predicts a second token."""
    width, heads, nope, rope, value, q_rank, kv_rank = 7168, 128, 128, 64, 128, 1536, 512
    sizes = {
        "vocab_size": 129280, "hidden_size": width, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3,
        "num_attention_heads": heads, "num_key_value_heads": heads,
        "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope, "v_head_dim": value,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    query = heads * (nope + rope)
    matrices = (
        (width, q_rank), (q_rank, query), (width, kv_rank + rope),
        (kv_rank, heads * (nope + value)), (heads * value, width),
    )  # fmt: skip
    return Shape("DeepseekV3ForCausalLM", "DeepseekV3Config", sizes, matrices, query, heads * value)


SHAPES: dict[str, Callable[[], Shape]] = {"qwen3": qwen3, "deepseek": deepseek}
