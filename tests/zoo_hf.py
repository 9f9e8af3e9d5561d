"""Hugging Face's models as they are, tiny and by hand: nothing is downloaded, nothing is changed.

A function of its name for each model; `ZOO` lists them. Each gives a Tiny: what `piper.trace` takes, in
float32 as transformers makes it. transformers is imported when a model is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, INNER, HEADS, LAYERS, LENGTH, BATCH, EXPERTS = 64, 16, 32, 2, 2, 8, 8, 4


@dataclass(frozen=True)
class Tiny:
    """A model, a global batch for it and its training step."""

    make_model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss


def tokens_and_labels() -> dict[str, torch.Tensor]:
    """A batch of a causal language model: other numbers at each call."""
    tokens = torch.randint(4, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": False,
        **more,
    }


def _causal(model: str, config: str, **sizes: Any) -> Tiny:
    """The class and the configuration of these names, on tokens and labels."""

    def make_model() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return Tiny(make_model, tokens_and_labels)


def gpt2(layers: int = LAYERS) -> Tiny:
    return _causal(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )


def llama(layers: int = LAYERS, keys: int = 1) -> Tiny:
    sizes = _sizes(num_key_value_heads=keys, num_hidden_layers=layers)
    return _causal("LlamaForCausalLM", "LlamaConfig", **sizes)


def qwen2() -> Tiny:
    return _causal("Qwen2ForCausalLM", "Qwen2Config", **_sizes(num_key_value_heads=1))


def qwen3(layers: int = LAYERS, keys: int = 1) -> Tiny:
    sizes = _sizes(num_key_value_heads=keys, head_dim=8, num_hidden_layers=layers)
    return _causal("Qwen3ForCausalLM", "Qwen3Config", **sizes)


def gemma() -> Tiny:
    return _causal("GemmaForCausalLM", "GemmaConfig", **_sizes(num_key_value_heads=1, head_dim=8))


def gemma2() -> Tiny:
    return _causal(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **_sizes(num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    )


def gemma3() -> Tiny:
    return _causal(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **_sizes(num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
        layer_types=["sliding_attention", "full_attention"],
    )


def gpt_neox() -> Tiny:
    return _causal("GPTNeoXForCausalLM", "GPTNeoXConfig", **_sizes())


def opt() -> Tiny:
    return _causal(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        word_embed_proj_dim=WIDTH,
        dropout=0.0,
        layerdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )


def bert() -> Tiny:
    return _causal(
        "BertForMaskedLM",
        "BertConfig",
        **_sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    )


def t5() -> Tiny:
    return _causal(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )


def vit() -> Tiny:
    def make_model() -> nn.Module:
        import transformers

        config = transformers.ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            image_size=8,
            patch_size=4,
            num_labels=5,
        )
        return transformers.ViTForImageClassification(config)

    def batch() -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(BATCH, 3, 8, 8),
            "labels": torch.randint(0, 5, (BATCH,)),
        }

    return Tiny(make_model, batch)


def whisper() -> Tiny:
    def make_model() -> nn.Module:
        import transformers

        config = transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            dropout=0.0,
            max_source_positions=LENGTH,
            max_target_positions=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            decoder_start_token_id=1,
            use_cache=False,
        )
        return transformers.WhisperForConditionalGeneration(config)

    def batch() -> dict[str, torch.Tensor]:
        return {
            "input_features": torch.randn(BATCH, 8, 2 * LENGTH),
            "labels": torch.randint(4, VOCABULARY, (BATCH, LENGTH)),
        }

    return Tiny(make_model, batch)


def mamba() -> Tiny:
    return _causal(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=LAYERS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )


def mamba2() -> Tiny:
    return _causal(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=LAYERS,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )


def mixtral() -> Tiny:
    return _causal(
        "MixtralForCausalLM",
        "MixtralConfig",
        **_sizes(
            num_key_value_heads=1,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
    )


def qwen3_moe() -> Tiny:
    return _causal(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **_sizes(
            num_key_value_heads=1,
            head_dim=8,
            moe_intermediate_size=INNER,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            output_router_logits=True,
        ),
    )


def deepseek_v3(layers: int = LAYERS, dense: int = 1) -> Tiny:
    """With so many layers, of which the first ones are `dense`."""
    return _causal(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **_sizes(
            num_key_value_heads=HEADS,
            moe_intermediate_size=INNER,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            num_hidden_layers=layers,
            first_k_dense_replace=dense,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
    )


def gpt_oss() -> Tiny:
    return _causal(
        "GptOssForCausalLM",
        "GptOssConfig",
        **_sizes(
            num_key_value_heads=1,
            head_dim=8,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            sliding_window=4,
            output_router_logits=True,
        ),
        layer_types=["sliding_attention", "full_attention"],
    )


ZOO: dict[str, Callable[[], Tiny]] = {
    model.__name__: model
    for model in (
        gpt2,
        llama,
        qwen2,
        qwen3,
        gemma,
        gemma2,
        gemma3,
        gpt_neox,
        opt,
        bert,
        t5,
        vit,
        whisper,
        mamba,
        mamba2,
        mixtral,
        qwen3_moe,
        deepseek_v3,
        gpt_oss,
    )
}
