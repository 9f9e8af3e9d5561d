"""flex_attention: scores and masks as the user wrote them, exactly as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import piper
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.model_trial import try_model
from tests.zoo_hf import ZOO, Tiny

LENGTH, HEADS, WIDTH = 8, 2, 8


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """A learned bias by distance; the mask is made with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH))
        self.mask = create_block_mask(_causal, None, None, LENGTH, LENGTH, device="cpu")

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        rows = x.shape[0]
        q, k, v = (
            part.view(rows, LENGTH, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )

        def near(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.bias[h, (q - k).abs()] - slopes[b] * (q - k)

        made = flex_attention(q, k, v, score_mod=near, block_mask=self.mask)
        return x + made.transpose(1, 2).reshape(rows, LENGTH, WIDTH)


class Documents(nn.Module):
    """Attention inside of documents, whose mask is made of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        rows = x.shape[0]
        q = self.layer(x).view(rows, LENGTH, HEADS, -1).transpose(1, 2)

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (documents[b, q] == documents[b, k]) & (q >= k)

        mask = create_block_mask(same, rows, None, LENGTH, LENGTH, device="cpu")
        made = flex_attention(q, q, q, block_mask=mask)
        return x + made.transpose(1, 2).reshape(rows, LENGTH, WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention()
        self.second = Documents()

    def forward(self, x: Tensor, slopes: Tensor, documents: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.first(x, slopes)
        with piper.annotate("PP"):
            return self.second(x, documents)


def _batch() -> dict[str, Tensor]:
    return {
        "x": torch.randn(8, LENGTH, WIDTH, dtype=torch.float64),
        "slopes": torch.rand(8, dtype=torch.float64),
        "documents": torch.randint(0, 3, (8, LENGTH)),
    }


def _step(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"], batch["slopes"], batch["documents"]).pow(2).mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own trace, in the reference
@pytest.mark.parametrize(
    "strategy", [{"pp": 2, "schedule": "zb_h1"}, {"dp": 2, "zero": 3}], ids=str
)
def test_it_trains_as_on_one_device(strategy: Any) -> None:
    torch.manual_seed(0)
    batches = [_batch() for _ in range(2)]
    program = piper.trace(lambda: Model().double(), batches[0], _step)
    job = program.apply(parallel(**strategy, microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


@pytest.mark.timeout(600)
def test_a_model_of_hugging_face_with_flex_attention() -> None:
    """It makes its block mask in forward, and compiles attention itself, which has no float64."""
    pytest.importorskip("transformers")
    llama = ZOO["llama"]()

    def make_model() -> nn.Module:
        model: Any = llama.make_model()
        model.set_attn_implementation("flex_attention")
        return model  # type: ignore[no-any-return]

    trial = try_model("llama", Tiny(make_model, llama.batch), ["dp 2"])
    assert trial.exact and not trial.refused and not trial.failed, trial
