"""Weights out: files that plain torch and safetensors read, written by the ranks that hold them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import piper
from piper.errors import FileError, RunError
from piper.runtime.state import weight_writing
from piper.strategies import parallel
from tests.zoo import ADAMW, batches_of, program_of

PARTS = parallel(pp=2, dp=2, ep=2, zero=3, microbatches=2)


def _files(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for file in set(json.loads(index.read_text())["weight_map"].values()):
        found |= load_file(folder / file)
    return found


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["moe", "tied"])
def test_saved_weights_are_those_that_were_trained(name: str, zero: int, tmp_path: Path) -> None:
    strategy = parallel(pp=2, dp=2, ep=2, zero=zero, microbatches=2)
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW)
    batches = batches_of(name)
    with job.launch("loopback") as run:
        run.step(batches[0])
        assert run.save_weights(tmp_path / "out", shard_size="4KB") == tmp_path / "out"
        trained, state = run.parameters(), run.state_dict()
        after = run.step(batches[1]).loss
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) > 2, "several files and their index"
    assert all(os.path.getsize(tmp_path / "out" / file) < 6000 for file in files)
    found = _files(tmp_path / "out")
    assert found.keys() == trained.keys()
    for key, tensor in trained.items():
        assert torch.equal(found[key], tensor), key
    model = job.source.make_model()
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state)
    again = program_of(name).apply(PARTS).lower(optimizer=ADAMW, weights=tmp_path / "out")
    with again.launch("loopback") as run:
        for key, tensor in run.parameters().items():
            assert torch.equal(tensor, trained[key]), key
        assert run.step(batches[1]).loss == pytest.approx(after, rel=1e-12)


def test_one_file_replaces_several(tmp_path: Path) -> None:
    job = program_of("tied").apply(PARTS).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        run.save_weights(tmp_path, shard_size=1000)
        assert len(list(tmp_path.glob("*.safetensors"))) > 5
        (tmp_path / "notes.txt").write_text("mine")
        run.save_weights(tmp_path)
        state = run.state_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = job.source.make_model()
    load_model(model, tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert state["head.weight"] is state["embed.weight"]


class _Kept(nn.Module):
    """With statistics, a buffer that is not saved and a parameter that no step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.unread = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            return self.norm(x) + self.table


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(3).mean()


def _kept(**more: Any) -> piper.Job:
    program = piper.trace(_Kept, torch.randn(8, 6), _step)
    strategy = parallel(pp=2, dp=2, zero=3, microbatches=2)
    return program.apply(strategy).lower(optimizer=piper.sgd(lr=0.01), **more)


def test_buffers_and_what_no_step_reads(tmp_path: Path) -> None:
    with _kept().launch("loopback") as run:
        run.step(torch.randn(8, 6))
        run.save_weights(tmp_path)
        buffers, state = run.buffers(), run.state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys() == _Kept().state_dict().keys()
    assert found["norm.num_batches_tracked"] == 4
    assert torch.equal(found["norm.running_mean"], buffers["norm.running_mean"])
    assert all(torch.equal(found[name], state[name]) for name in state)
    with _kept(weights=tmp_path, seed=3).launch("loopback") as run:
        again = run.state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)


def _layers() -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    layers.register_buffer("number", torch.tensor(7))
    layers[0].bias.requires_grad_(False)
    return layers


def test_masters_in_a_chosen_dtype(tmp_path: Path) -> None:
    program = piper.trace(_layers, torch.randn(8, 6), _step).apply(parallel(dp=2, zero=3))
    with program.lower(precision="bf16").launch("loopback") as run:
        run.step(torch.randn(8, 6))
        run.save_weights(tmp_path / "kept")
        run.save_weights(tmp_path / "half", dtype="bfloat16")
        masters, params = run.masters(), run.parameters()
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, master in masters.items():
        assert kept[name].dtype == torch.float32 and torch.equal(kept[name], master)
        assert half[name].dtype == torch.bfloat16 and torch.equal(half[name], master.bfloat16())
    assert torch.equal(kept["0.bias"], params["0.bias"]), "frozen: as it is held"
    assert half["number"].dtype == torch.int64 and half["number"] == 7


def test_a_rank_writes_only_what_it_holds(tmp_path: Path) -> None:
    job = program_of("moe").apply(PARTS).lower(optimizer=ADAMW)
    written: list[int] = []
    real = weight_writing.write_weights

    def counted(worker: Any, entries: Any, places: Any, folder: str) -> str:
        with mock.patch.object(weight_writing.os, "pwrite", wraps=os.pwrite) as pwrite:
            problem = real(worker, entries, places, folder)
        written.append(sum(len(call.args[1]) for call in pwrite.call_args_list))
        return problem

    with (
        job.launch("loopback") as run,
        mock.patch("piper.runtime.launch.member.write_weights", counted),
    ):
        run.save_weights(tmp_path)
        total = sum(8 * tensor.numel() for tensor in run.parameters().values())
    assert sum(written) == total
    assert max(written) < 0.3 * total


def test_what_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with _kept().launch("loopback") as run:
        with pytest.raises(FileError, match="cannot be written: Not a directory"):
            run.save_weights(tmp_path / "file")
        full = OSError(28, "No space left on device")
        with (
            mock.patch.object(weight_writing.os, "pwrite", side_effect=full),
            pytest.raises(FileError, match="cannot be written: No space left on device"),
        ):
            run.save_weights(tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []
        with (
            mock.patch("piper.api.weights_out.os.posix_fallocate", side_effect=full),
            pytest.raises(FileError, match="No space left on device"),
        ):
            run.save_weights(tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []
        with pytest.raises(RunError, match="dtype='int8'"):
            run.save_weights(tmp_path / "out", dtype="int8")
        run.step(torch.randn(8, 6))


def test_a_file_that_is_still_read_is_not_replaced(tmp_path: Path) -> None:
    with _kept().launch("loopback") as run:
        run.save_weights(tmp_path)
    with _kept(weights=tmp_path).launch("loopback") as run:
        wanted = run.state_dict()["unread"]
        with pytest.raises(FileError, match=r"still reads unread from it") as refused:
            run.save_weights(tmp_path / "." / "", dtype="bfloat16")
        assert refused.value.legal == "another folder"
        assert torch.equal(run.state_dict()["unread"], wanted)
        run.save_weights(tmp_path / "other", dtype="bfloat16")


def test_files_of_two_calls_are_never_taken_for_those_of_one(tmp_path: Path) -> None:
    with _kept().launch("loopback") as run:
        run.save_weights(tmp_path, shard_size=32)
        run.step(torch.randn(8, 6))
        (tmp_path / ".0123abcd.partial").mkdir()  # of a process that was killed
        (tmp_path / ".step-00000002.0123abcd.partial").mkdir()  # a checkpoint on its way
        (tmp_path / "0123abcd.partial").mkdir()
        real, done = os.replace, []

        def fails(old: Path, new: Path) -> None:
            if done:
                raise OSError(28, "No space left on device")
            done.append(new)
            real(old, new)

        with (
            mock.patch("piper.api.weights_out.os.replace", fails),
            pytest.raises(FileError, match="No space left on device"),
        ):
            run.save_weights(tmp_path, shard_size=32)
        with pytest.raises(FileError, match="has no weights"):
            _kept(weights=tmp_path)
        run.save_weights(tmp_path, shard_size=32)
        left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert left == [".step-00000002.0123abcd.partial", "0123abcd.partial"]
        wanted = run.state_dict()
    with _kept(weights=tmp_path).launch("loopback") as run:
        found = run.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
