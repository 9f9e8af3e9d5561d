"""torch.utils.checkpoint: its code is made again, layer by layer, with the numbers of one device."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import piper
from piper.api.job import Job
from piper.bodies.files.codec import decode
from piper.errors import TraceError
from piper.plan.report.summary import slot_bytes
from piper.strategies import parallel
from piper.training.verdict import verify
from piper.training.verify import compare, train_one_device
from tests.loopback.test_inside import CLOSE, measured_peak
from tests.zoo_hf import VOCABULARY, ZOO

WIDTH = 16
BATCH = torch.randn(64, 8, WIDTH, dtype=torch.float64)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + torch.tanh(self.down(inner))


class Layers(nn.Module):
    def __init__(self, how: str, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.layers) // 2
        for part in (self.layers[:half], self.layers[half:]):
            with piper.annotate("PP"):
                x = self.embed(x)
                if self.how == "sequential":
                    x = checkpoint_sequential(list(part), half, x, use_reentrant=False)
                    continue
                for layer in part:
                    x = self.run_layer(layer, x)
        return x

    def run_layer(self, layer: nn.Module, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        if self.how == "plain":
            return layer(x)
        if self.how == "policy":
            return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(layer, x, use_reentrant=self.how == "reentrant")


def _step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@cache
def _job(how: str, layers: int = 4, dropout: float = 0.0, **options: Any) -> Job:
    program = piper.trace(lambda: Layers(how, layers, dropout).double(), BATCH, _step)
    return program.apply(parallel(microbatches=2, **options)).lower(optimizer=piper.adamw(lr=1e-3))


def _saved(job: Job) -> int:
    slots = [slot for part in job.plan.classes for slot in part.slots]
    return sum(slot_bytes(slot) for slot in slots if slot.name.startswith("$saved."))


def _assert_exact(job: Job) -> None:
    batches = [BATCH, BATCH.flip(0)]
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("plain_checkpoint", {"pp": 2, "schedule": "zb_h1"}),
        ("plain_checkpoint", {"dp": 2, "zero": 3, "recompute": "expensive"}),
        ("reentrant", {"pp": 2}),
        ("sequential", {"pp": 2}),
        ("policy", {"pp": 2}),
    ],
    ids=lambda word: word if isinstance(word, str) else "-".join(map(str, word.values())),
)
def test_numbers_are_those_of_one_device(how: str, options: dict[str, Any]) -> None:
    _assert_exact(_job(how, **options))


@pytest.mark.parametrize("how", ["plain_checkpoint", "reentrant"])
def test_dropout_drops_the_same_again(how: str) -> None:
    job = _job(how, dropout=0.3, pp=2)
    _assert_exact(job)
    assert _saved(job) <= _saved(_job("plain_checkpoint", pp=2))  # no mask is saved


def _operators(job: Job, phase: str) -> list[str]:
    tasks = [task for part in job.plan.classes for task in part.tasks]
    names = {task.body for task in tasks if getattr(task, "phase", "") == phase}
    graphs = [decode(job.bodies[name]).graph for name in names]
    return [str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_function"]


def test_only_inputs_of_layers_are_saved_and_the_rest_is_made_again() -> None:
    plain, again, policy = (_job(how, pp=2) for how in ("plain", "plain_checkpoint", "policy"))
    row = BATCH.numel() // 2 * BATCH.element_size()
    # Per stage the results of the embedding and of the first layer, at the end also that of the last
    # one, for the loss; of both microbatches.
    assert _saved(again) == 2 * 5 * row
    assert _saved(plain) > 5 * _saved(again)
    assert _saved(again) < _saved(policy) < _saved(plain)
    gelus = [_operators(job, "B").count("aten.gelu.default") for job in (plain, again, policy)]
    assert gelus[0] == 0 and gelus[1] == gelus[2] > 0
    products = [_operators(job, "B").count("aten.addmm.default") for job in (plain, again, policy)]
    assert products[0] == products[2] == 0 < products[1]


def test_layers_are_made_again_one_after_the_other() -> None:
    """The bytes inside of a backward are those of one layer, however many a stage has."""
    few, many = (_job("plain_checkpoint", layers) for layers in (4, 8))
    [before], [after] = few.report.peaks, many.report.peaks
    assert after.by_category["inside"] <= 1.05 * before.by_category["inside"]
    whole = _job("plain", 8, recompute="nothing")
    [peak], [plain] = whole.report.peaks, _job("plain", 8).report.peaks
    assert after.total < 0.7 * peak.total and after.total < 0.7 * plain.total


def test_the_planned_peak_is_the_measured_one() -> None:
    batch = BATCH.repeat(4, 1, 1)
    program = piper.trace(lambda: Layers("plain_checkpoint", 8).double(), batch, _step)
    job = program.apply(parallel(microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
    with job.launch("loopback") as run:
        measured = measured_peak(run, batch)
    [peak] = job.report.peaks
    assert measured <= peak.total <= CLOSE * measured


def test_layers_share_bodies() -> None:
    """Regions are known up to their numbers, and policies by what they are made of."""
    for how in ("plain_checkpoint", "policy"):
        tasks = [t for part in _job(how, pp=2).plan.classes for t in part.tasks]
        assert (
            len({t.body for t in tasks if getattr(t, "phase", "") == "F"}) == 2
        )  # one has the loss


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0.0)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=True)


def test_a_reentrant_checkpoint_that_would_train_nothing_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"no argument with a gradient \(.*test_checkpoint.*\n.*False"
    ):
        piper.trace(lambda: Bare().double(), BATCH, _step)


class Mixed(nn.Module):
    """A layer of experts, which count as regions while its code is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        made = piper.mixture(self.experts, rows, chosen, weights, num_experts=4)
        return x + made.view(x.shape)

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        return piper.grouped_mm(rows, self.up, counts).tanh()


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize(
    "degrees",
    [{"dp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "microbatches": 2}],
    ids=str,
)
def test_experts_in_checkpointed_code(degrees: dict[str, Any], adversary: bool) -> None:
    program = piper.trace(lambda: Mixtures().double(), BATCH, _step)
    assert {
        value for chunk in program.graph.chunks for tag, value in chunk.tags if tag == "EP"
    } == {0, 1}
    job = program.apply(parallel(**degrees)).lower(optimizer=piper.adamw(lr=1e-3))
    with job.launch("loopback", adversary=adversary) as run:
        errors = compare(run, [BATCH], train_one_device(job, [BATCH]))
    assert errors.exact, errors


def test_experts_of_hugging_face_in_checkpointed_code() -> None:
    """Which also notes their routers' logits while it runs."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    tiny = ZOO["qwen3_moe"]()

    def make() -> nn.Module:
        model = tiny.make_model()
        model.gradient_checkpointing_enable()
        return model.train()

    tokens = torch.randint(4, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    program = piper.trace(make, batch, tiny.step).apply(parallel(dp=2, ep=2))
    found = verify(program, [batch])
    assert found.exact, found


def test_layers_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip

    def make(enabled: bool) -> nn.Module:
        model = transformers.LlamaForCausalLM(config).double()
        model.train()
        if enabled:
            model.gradient_checkpointing_enable()
        return model

    batch = {"input_ids": torch.randint(0, 32, (4, 8))}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(**batch).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    saved, losses = [], []
    for enabled in (False, True):
        program = piper.trace(lambda enabled=enabled: make(enabled), batch, step)
        job = program.apply(parallel(pp=2, microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
        saved.append(_saved(job))
        with job.launch("loopback") as run:
            losses.append([run.step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]
    assert saved[0] > 3 * saved[1]
