"""More models as they are, tiny, like those of tests/zoo_hf.py: images, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo_hf import BATCH, HEADS, INNER, LAYERS, LENGTH, WIDTH, ZOO, Tiny

CLASSES = 5


def _images(model: str, config: str, **sizes: Any) -> Tiny:
    def make_model() -> nn.Module:
        import transformers

        return getattr(transformers, model)(
            getattr(transformers, config)(num_labels=CLASSES, **sizes)
        )

    def batch() -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(BATCH, 3, 32, 32),
            "labels": torch.randint(0, CLASSES, (BATCH,)),
        }

    return Tiny(make_model, batch)


def resnet() -> Tiny:
    """With BatchNorm in training."""
    return _images(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    )


def swin() -> Tiny:
    return _images(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    )


class OfSequences(Tiny):
    """A module of torch that makes sequences of sequences; they are to be the labels."""

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = [leaf for name, leaf in batch.items() if name != "labels"]
        return F.mse_loss(model(*inputs), batch["labels"])


def _sequences(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randn(BATCH, LENGTH, WIDTH) for name in names}


def transformer() -> Tiny:
    return OfSequences(
        lambda: nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.1, batch_first=True),
        lambda: _sequences("source", "target", "labels"),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.last(x)


def lstm() -> Tiny:
    return OfSequences(Recurrent, lambda: _sequences("x", "labels"))


MODELS: dict[str, Callable[[], Tiny]] = ZOO | {
    model.__name__: model for model in (resnet, swin, transformer, lstm)
}
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
