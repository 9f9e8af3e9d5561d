"""Hugging Face's folders: read under the names that they have, trained, read by `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.bodies.chunk_code import spec_of
from piper.errors import WeightsError
from piper.frontend.hf_weights import converted, unneeded_names
from piper.frontend.laid_out import InexpressibleError, LaidOut
from piper.runtime.state.read_pieces import PieceReader
from piper.runtime.state.weight_sources import weight_source
from piper.stored.matching import match
from piper.strategies import parallel
from tests.zoo_hf import EXPERTS, INNER, WIDTH, ZOO, Tiny

transformers = pytest.importorskip("transformers")


def _pretrained(name: str, folder: Path, **more: Any) -> tuple[Tiny, nn.Module]:
    """A model with weights of its own, and its folder, as `save_pretrained` writes it."""
    tiny = ZOO[name]()
    torch.manual_seed(4)
    model = tiny.make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    model.save_pretrained(folder, **more)
    return tiny, model


def _trained(tiny: Tiny, model: nn.Module, batch: dict[str, torch.Tensor]) -> nn.Module:
    """Two steps of plain torch on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        tiny.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_llama_folder_trains_and_comes_back(tmp_path: Path) -> None:
    tiny, model = _pretrained("llama", tmp_path / "in", max_shard_size="8KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    batch = tiny.batch()
    program = piper.trace(tiny.make_model, batch, tiny.step)
    strategy = parallel(pp=2, dp=2, zero=3, microbatches=2)
    job = program.apply(strategy).lower(weights=tmp_path / "in", optimizer=piper.sgd(lr=0.1))
    with job.launch("loopback") as run:
        share = [n / sum(p.numel() * 4 for p in model.parameters()) for n in run.bytes_read()]
        assert sum(share) == pytest.approx(1.0, abs=0.01) and max(share) < 0.35
        for name, param in model.named_parameters():
            assert torch.equal(run.parameters()[name], param), name
        run.step(batch)
        run.step(batch)
        run.save_weights(tmp_path / "out", shard_size="8KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model) and again.dtype == torch.float32
    _trained(tiny, model, batch)
    with torch.no_grad():
        logits = again(batch["input_ids"]).logits
        wanted = model(batch["input_ids"]).logits
    assert torch.allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, ZOO["llama"]().make_model()(batch["input_ids"]).logits)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_tensors_of_single_experts_are_stacked(name: str, tmp_path: Path) -> None:
    tiny, model = _pretrained(name, tmp_path / "in")
    stored = weight_source(tmp_path / "in").stored
    single = [key for key in stored if ".experts.1." in key]
    assert single, "the folder has the names that people's files have"
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step)
    strategy = parallel(pp=2, dp=2, ep=2, zero=3, microbatches=2)
    job = program.apply(strategy).lower(weights=tmp_path / "in", optimizer=piper.sgd(lr=0.1))
    with job.launch("loopback") as run:
        found = run.parameters()
        for key, param in model.named_parameters():
            assert torch.equal(found[key], param), key
        total = sum(p.numel() * 4 for p in model.parameters())
        assert max(run.bytes_read()) < 0.3 * total
        run.save_weights(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    for key, param in model.named_parameters():
        assert torch.equal(again.get_parameter(key), param), key


def test_a_base_models_file_and_a_tied_head(tmp_path: Path) -> None:
    tiny, model = _pretrained("gpt2", tmp_path / "in")
    model.transformer.save_pretrained(tmp_path / "base")
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step)
    for folder in ("in", "base"):  # neither has lm_head.weight, the second no "transformer."
        stored = weight_source(tmp_path / folder).stored
        assert "lm_head.weight" not in stored
        job = program.lower(weights=tmp_path / folder)
        with job.launch("loopback") as run:
            for key, param in model.named_parameters():
                assert torch.equal(run.parameters()[key], param), key


@pytest.mark.parametrize("name", ZOO)
def test_the_files_of_every_model_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    model = ZOO[name]().make_model()
    model.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", save_original_format=False)  # as save_weights does
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    names = {key: first.setdefault(id(tensor), key) for key, tensor in state.items()}
    types = {key: spec_of(tensor) for key, tensor in state.items()}
    stored = converted(model, weight_source(tmp_path / "theirs").stored)
    found = match(stored, names, types, strict=True, unneeded=unneeded_names(model)).model
    reader = PieceReader(found)
    assert found.keys() == set(names.values())
    for key in found:
        assert torch.equal(reader.tensor(key), state[key]), key
    again = type(model).from_pretrained(tmp_path / "ours")
    for key, param in model.named_parameters():
        assert torch.equal(again.get_parameter(key), param), key


def test_tensors_that_lie_turned_under_the_models_own_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = transformers.core_model_loading
    turned = loading.WeightConverter(  # as qwen3_vl_moe has it
        "mlp.down_proj", "mlp.down_proj", operations=[loading.Transpose(0, 1, check_dims=True)]
    )
    rules = transformers.conversion_mapping
    monkeypatch.setattr(rules, "get_model_conversion_mapping", lambda model: [turned])
    tiny = ZOO["llama"]()
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step)
    state = {name: torch.randn_like(t) for name, t in tiny.make_model().state_dict().items()}
    old = {name: t.t().contiguous() if "down_proj" in name else t for name, t in state.items()}
    for weights in (state, old):
        with program.lower(weights=weights).launch("single") as run:
            found = run.parameters()
        assert all(torch.equal(found[name], state[name]) for name in found)


def test_old_names_that_no_model_has_any_more() -> None:
    tiny = ZOO["llama"]()
    state = dict(tiny.make_model().state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    program = piper.trace(tiny.make_model, tiny.batch(), tiny.step)
    program.lower(weights=state)
    state["model.layers.0.self_attn.extra"] = torch.zeros(4)
    with pytest.raises(WeightsError, match=r"surplus   1: model.layers.0.self_attn.extra"):
        program.lower(weights=state)


def test_what_needs_elements_is_refused() -> None:
    tiny = ZOO["mixtral"]()
    model = tiny.make_model()
    state = {
        f"model.layers.0.block_sparse_moe.experts.{number}.w2.weight": torch.zeros(WIDTH, INNER)
        for number in range(EXPERTS)
    }
    state["model.layers.0.block_sparse_moe.experts.3.w2.weight"] = torch.zeros(WIDTH, INNER + 1)
    with pytest.raises(WeightsError) as caught:
        converted(model, weight_source(state).stored)
    assert str(caught.value).startswith(
        "model.layers.0.mlp.experts.down_proj is made of 4 stored tensors by MergeModulelist, which "
        "needs [1, 16, 33] beside [1, 16, 32]"
    )


@pytest.mark.parametrize("form", ["memory", "file"])
def test_laid_out_tensors_are_placed_as_torch_places_them(form: str, tmp_path: Path) -> None:
    tensors = {name: torch.randn(4, 6) for name in "abc"}
    torch.save(tensors, tmp_path / "tensors.pt")
    source = weight_source(tensors if form == "memory" else tmp_path / "tensors.pt")

    def both(function: Any) -> None:
        laid = function(*(LaidOut(source.stored[name]) for name in tensors))
        wanted = function(*tensors.values())
        assert laid.shape == wanted.shape
        reader = PieceReader({"made": laid.stored}, source.memory)
        assert torch.equal(reader.tensor("made"), wanted)

    both(lambda a, b, c: torch.stack([a, b, c], dim=1))
    both(lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([b, c])], dim=-1))
    both(lambda a, b, c: torch.chunk(torch.cat([a, b, c], dim=1), 4, dim=1)[1].contiguous())
    both(lambda a, b, c: torch.split(torch.cat([a, b, c]), [5, 4, 3], dim=0)[1])
    both(lambda a, b, c: torch.transpose(torch.stack([a, b, c]), 0, 2).chunk(3, dim=1)[1])
    both(lambda a, b, c: torch.cat([a.transpose(0, 1), b.transpose(0, 1).narrow(0, 2, 3)]))
    with pytest.raises(InexpressibleError, match=r"Tensor\.reshape"):
        LaidOut(source.stored["a"]).reshape(24)
    with pytest.raises(InexpressibleError, match=r"torch\.mul"):
        torch.mul(LaidOut(source.stored["a"]), 2)
