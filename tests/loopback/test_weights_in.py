"""Weights in: every kind of source under pipelines, experts and ZeRO 3, and names that do not fit."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import piper
from piper.errors import FileError, PiperError, WeightsError
from piper.plan.holdings import holdings
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, batches_of, program_of

PARTS = parallel(pp=2, dp=2, ep=2, zero=3, microbatches=2)


@cache
def _model(name: str = "moe") -> nn.Module:
    """With other weights than any seed gives."""
    model = program_of(name).source.make_model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4)
    return model


@cache
def _program(name: str = "moe") -> piper.Program:
    return program_of(name).apply(PARTS)


def _safetensors(folder: Path, model: nn.Module) -> Path:
    save_model(model, str(folder / "any.safetensors"))
    return folder / "any.safetensors"


def _folder(folder: Path, model: nn.Module) -> Path:
    """In two files with an index, as Hugging Face has them."""
    state = {name: param.detach() for name, param in model.named_parameters()}
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _torch_file(folder: Path, model: nn.Module) -> Path:
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "any.pt")
    return folder / "any.pt"


def _torch_folder(folder: Path, model: nn.Module) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def _dcp(folder: Path, model: nn.Module) -> Path:
    state = {"model": model.state_dict(), "optimizer": {"step": torch.zeros(3)}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def _memory(folder: Path, model: nn.Module) -> Any:
    return model.state_dict()


KINDS = (_memory, _safetensors, _folder, _torch_file, _torch_folder, _dcp)


def _assert_starts_from(run: piper.Run, model: nn.Module) -> None:
    found = run.parameters()
    for name, param in model.named_parameters():
        assert torch.equal(found[name], param), name
    assert run.differing_replicas() == []


@pytest.mark.parametrize("name", ["moe", "tied"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_source_is_cut_for_the_ranks(
    kind: Callable[[Path, nn.Module], Any], name: str, tmp_path: Path
) -> None:
    model = _model(name)
    job = _program(name).lower(weights=kind(tmp_path, model), optimizer=ADAMW)
    with job.launch("loopback") as run:
        _assert_starts_from(run, model)
        read = run.bytes_read()
        held = [_held_bytes(job.plan, rank) for rank in range(4)]
    if kind is _memory:
        assert read == [0, 0, 0, 0]
    elif kind is not _dcp:  # whose pieces are read as they were written
        assert read == held
        assert sum(read) < 1.2 * sum(p.numel() * 8 for p in model.parameters())


def _held_bytes(plan: Any, rank: int) -> int:
    kinds = ("param", "buffer")
    return sum(8 * (h.last - h.first) for h in holdings(plan, rank) if h.what in kinds)


def test_of_large_pieces_of_a_checkpoint_a_part_is_read(tmp_path: Path) -> None:
    def wide() -> nn.Module:
        return nn.Linear(64, 512, bias=False)

    model = wide()
    program = piper.trace(wide, torch.randn(8, 64), _step)
    job = program.apply(parallel(dp=4, zero=3)).lower(weights=_dcp(tmp_path, model))
    with job.launch("loopback") as run:
        _assert_starts_from(run, model)
        assert run.bytes_read() == [64 * 512] * 4


def test_training_goes_on_like_one_device_with_these_weights(tmp_path: Path) -> None:
    job = _program().lower(weights=_safetensors(tmp_path, _model()), optimizer=ADAMW)
    batches = batches_of("moe")
    reference = train_one_device(job, batches)
    other = train_one_device(_program().lower(optimizer=ADAMW), batches)
    assert reference.losses[0] != other.losses[0]
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


@pytest.mark.parametrize("zero", [0, 2])
def test_narrower_weights_are_trained_too(zero: int) -> None:
    state = {name: tensor.float() for name, tensor in _model().state_dict().items()}
    strategy = parallel(pp=2, dp=2, zero=zero, microbatches=2)
    job = program_of("moe").apply(strategy).lower(weights=state, optimizer=ADAMW)
    batches = batches_of("moe")
    with job.launch("loopback") as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors


class _Turned(nn.Module):
    """Weights of which some are saved as views: turned, and out of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.ones(3, 2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x) + self.table
        with piper.annotate("PP"):
            return self.second(x) * self.scale.sum(0)


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _turned(**more: Any) -> piper.Job:
    program = piper.trace(_Turned, torch.randn(4, 6), _step)
    return program.apply(parallel(pp=2, dp=2, zero=3)).lower(**more)


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = _Turned()
    return {n: torch.randn(t.shape, generator=generator) for n, t in model.state_dict().items()}


def test_views_in_a_torch_file(tmp_path: Path) -> None:
    state = _state()
    large = torch.zeros(9, 8)
    large[2:6, 1:7] = state["first.weight"]
    saved = {
        **state,
        "first.weight": large[2:6, 1:7],
        "second.weight": state["second.weight"].t().contiguous().t(),
        "scale": state["scale"][:1].expand(3, 2),
    }
    torch.save(saved, tmp_path / "views.pt")
    with _turned(weights=tmp_path / "views.pt").launch("loopback") as run:
        found = run.parameters() | run.buffers()
        assert sum(run.bytes_read()) == 4 * (28 + 8 + 2 * 6)  # both data ranks have the buffer
    for name in state:
        assert torch.equal(found[name], saved[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in _state().items()}
    save_file(state, tmp_path / "w.safetensors")
    with _turned(weights=tmp_path / "w.safetensors").launch("loopback") as run:
        found = run.parameters() | run.buffers()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.float()), name


def test_masters_start_from_what_bf16_would_lose() -> None:
    state = _state()
    with _turned(weights=state, precision="bf16").launch("loopback") as run:
        masters, params = run.masters(), run.parameters()
    for name, master in masters.items():
        assert torch.equal(master, state[name])
        assert torch.equal(params[name], state[name].bfloat16())


def test_evaluations_start_from_them_too(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "w.pt")
    job, batch = _turned(weights=tmp_path / "w.pt"), torch.ones(4, 6)
    with job.launch("loopback") as run:
        wanted = run.evaluate(batch).loss
    with _turned(weights=_state()).evaluation().launch("loopback") as run:
        assert run.step(batch).loss == wanted
    job.save(tmp_path / "job.json")
    job.evaluation().save(tmp_path / "evaluation.json")
    loaded = piper.load_job(tmp_path / "job.json").evaluation()
    for evaluation in (job.evaluation(), loaded, piper.load_job(tmp_path / "evaluation.json")):
        with evaluation.launch("loopback") as run:
            assert run.step(batch).loss == wanted


@pytest.mark.parametrize("file", ["w.safetensors", "w.pt"])
def test_a_file_that_changes_after_it_was_looked_into(file: str, tmp_path: Path) -> None:
    save: Any = save_file if file.endswith("safetensors") else torch.save
    path, state = tmp_path / file, _state()
    save(state, path)
    job = _turned(weights=path)
    job.save(tmp_path / "job.json")
    os.utime(path, ns=(0, 0))
    job_since = _turned(weights=path)
    save({name: tensor + 1 for name, tensor in state.items()}, path)
    for stale in (job, job_since, piper.load_job(tmp_path / "job.json")):
        with pytest.raises(PiperError, match=rf"{file} has changed since lower\(weights"):
            stale.launch("loopback")
    with _turned(weights=path).launch("loopback") as run:
        assert torch.equal(run.parameters()["first.bias"], state["first.bias"] + 1)


@pytest.mark.parametrize("save", [save_file, torch.save, None])
def test_tied_names_with_values_of_their_own(save: Any, tmp_path: Path) -> None:
    program, state = program_of("tied"), _model("tied").state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}

    def lowered(**more: Any) -> piper.Job:
        if save is None:
            return program.lower(weights=state, **more)
        save(state, tmp_path / "w")
        return program.lower(weights=tmp_path / "w", **more)

    with lowered().launch("single") as run:
        assert torch.equal(run.parameters()["embed.weight"], state["embed.weight"])
    state["head.weight"].view(-1)[-1] += 1
    with pytest.raises(WeightsError, match=r"several values for one tensor") as caught:
        lowered()
    assert caught.value.details == ("embed.weight, head.weight",)
    with pytest.warns(UserWarning, match=r": the last of embed.weight, head.weight, which differ"):
        job = lowered(strict=False)
    with job.launch("single") as run:
        assert torch.equal(run.parameters()["embed.weight"], state["head.weight"])


def test_of_a_folder_of_checkpoints_the_latest_is_taken(tmp_path: Path) -> None:
    with _turned().launch("loopback") as run:
        for step in (9, 10):
            run.step(torch.randn(4, 6))
            run.save(tmp_path / f"step-{step:08d}")
        wanted = run.parameters() | run.buffers()  # of which one is in no state_dict
    with _turned(weights=tmp_path, seed=3).launch("loopback") as run:
        found = run.parameters() | run.buffers()
    assert found.keys() == wanted.keys() and "table" in found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_names_that_do_not_fit() -> None:
    state = _state()
    state["extra.bias"] = state.pop("first.bias")
    state["second.weight"] = torch.zeros(2, 5)
    with pytest.raises(WeightsError) as caught:
        _turned(weights=state)
    place = r"weights of state_dict \(\S*test_weights_in\.py:\d+\): "
    assert re.sub(place, "", str(caught.value)).splitlines() == [
        "the weights do not fit the model",
        "    missing   1: first.bias",
        "    surplus   1: extra.bias",
        "    misshapen 1: second.weight is [2, 5], the model has [2, 4]",
        "  legal: weights of this model",
    ]
    with pytest.raises(WeightsError, match=r"misshapen 1: second.weight"):
        _turned(weights=state, strict=False)
    state["second.weight"] = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(WeightsError, match=r"second.weight is int64, the model has float32"):
        _turned(weights=state)
    ddp = {f"module.{name}": tensor for name, tensor in _state().items()}
    with pytest.raises(WeightsError, match=r"legal: names without 'module\.'"):
        _turned(weights=ddp)


def test_what_is_not_strict_says_what_it_left() -> None:
    state = _state()
    state["extra.bias"] = state.pop("first.bias")
    with pytest.warns(UserWarning) as warned:
        job = _turned(weights=state, strict=False)
    [message] = [str(warning.message) for warning in warned]
    assert message == (
        "weights of state_dict: initial values for 1: first.bias; no use for 1: extra.bias"
    )
    assert warned[0].filename == __file__
    with job.launch("loopback") as run, _turned().launch("loopback") as fresh:
        found, initial = run.parameters(), fresh.parameters()
    assert torch.equal(found["first.bias"], initial["first.bias"])
    assert torch.equal(found["first.weight"], state["first.weight"])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (3, "weights are a int"),
        ({"a": 1}, "a dict without tensors"),
        ("nowhere.safetensors", "there is no file"),
        (nn.Linear(1, 1), "weights are a model"),
        ({"a": torch.ones(2, device="meta")}, "a in the state_dict .* a Tensor .* on meta"),
        ({"a": torch.ones(2, 2).to_sparse()}, "no plain tensor, but a Tensor of torch.sparse_coo"),
        ({"a": TwoTensor(torch.ones(2), torch.ones(2))}, "but a TwoTensor"),
        (Path(__file__).parent, "has no weights"),
        (Path(__file__), "is no safetensors file"),
    ],
)
def test_no_weights(weights: Any, words: str) -> None:
    with pytest.raises(FileError, match=words) as caught:
        _turned(weights=weights)
    assert "test_weights_in.py" in str(caught.value)
