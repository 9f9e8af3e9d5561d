"""Classes of transformers from its own tables, made tiny by the usual names of configuration fields."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import piper
from piper.errors import PiperError
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verdict import Oracle
from tests.zoo_hf import BATCH, LENGTH, Tiny

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "d_model": 16, "n_embd": 16, "embed_dim": 16, "dim": 16,
    "intermediate_size": 32, "ffn_dim": 32, "d_ff": 32, "n_inner": 32, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "ffn_hidden_size": 32, "hidden_dim": 32, "dense_intermediate_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 2, "num_heads": 2,
    "n_head": 2, "n_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "rotary_dim": 8, "word_embed_proj_dim": 16,
    "embedding_size": 16, "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "state_size": 4, "image_size": 32, "patch_size": 8, "type_vocab_size": 2,
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4,
    "depths": [1, 1], "hidden_sizes": [16, 16], "is_decoder": True,
}  # fmt: skip
LABELS = 5
TOO_LARGE = 2_000_000  # parameters: the fields of its size have other names
TABLES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "text": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


def _classes() -> dict[str, str]:
    """Class -> its table; of classes for text those of model types that are not causal."""
    found: dict[str, str] = {}
    for table, names in TABLES.items():
        for kind, classes in names.items():
            if table == "text" and kind in TABLES["causal"]:
                continue
            found.setdefault(classes[0] if isinstance(classes, tuple) else classes, table)
    return found


CLASSES = _classes()


@dataclass
class Outcome:
    """Trains, refused, differs, crashes, or does not run eagerly; and why not."""

    outcome: str
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def tiny_class(name: str) -> Tiny:
    """The class with whatever of TINY its configuration has, and a batch for its table."""
    cls = getattr(transformers, name)
    fields = vars(cls.config_class())
    sizes = {key: value for key, value in TINY.items() if key in fields}
    if isinstance(fields.get("layer_types"), list):
        sizes["layer_types"] = fields["layer_types"][-2:]

    def batch() -> dict[str, torch.Tensor]:
        if CLASSES[name] == "image":
            inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
            return {**inputs, "labels": torch.randint(0, LABELS, (BATCH,))}
        tokens = torch.randint(4, 64, (BATCH, LENGTH))
        causal = CLASSES[name] == "causal"
        return {
            "input_ids": tokens,
            "labels": tokens.clone() if causal else torch.randint(0, LABELS, (BATCH,)),
        }

    if CLASSES[name] != "causal":
        sizes["num_labels"] = LABELS
    return Tiny(lambda: cls(cls.config_class(**sizes)), batch)


def _eager(tiny: Tiny) -> None:
    with torch.device("meta"):
        large = sum(param.numel() for param in tiny.make_model().parameters()) > TOO_LARGE
    if large:
        raise ValueError("not tiny")
    model: nn.Module = tiny.make_model()
    tiny.step(model, tiny.batch()).backward()


def try_class(name: str) -> Outcome:
    """One step of AdamW under dp 2 against one device."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        tiny = tiny_class(name)
        _eager(tiny)
    except Exception as error:  # the generated configuration does not make sense
        return Outcome(
            "does not run eagerly", refused={"eager": f"{type(error).__name__}: {error}"}
        )
    return _outcome(lambda: _train(tiny))


def _train(tiny: Tiny) -> str:
    batch = doubled(tiny.batch())
    program = piper.trace(doubled_model(tiny.make_model), batch, tiny.step)
    oracle = Oracle(program.apply(parallel(dp=2, microbatches=2)), [batch])
    with oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    return "" if errors.exact else str(errors)


def _outcome(train: Callable[[], str]) -> Outcome:
    try:
        difference = train()
    except PiperError as error:
        return Outcome("refused", refused={type(error).__name__: str(error)})
    except Exception as error:  # what must never be
        return Outcome("crashes", failed={"crash": f"{type(error).__name__}: {error}"})
    return Outcome("differs", failed={"dp 2": difference}) if difference else Outcome("trains")
