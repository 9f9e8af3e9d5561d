"""`piper checkpoint show|verify|convert`."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import piper
from piper.api.run import Run
from piper.cli.main import main
from piper.ir.tensor_type import dtype_bytes
from piper.stored.safetensors_index import file_index
from piper.strategies import parallel
from tests.zoo import batches_of, program_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("run")
    job = program_of("dense").apply(parallel(dp=2, zero=3)).lower(optimizer=piper.adamw(lr=1e-2))
    run = job.launch("loopback")
    run.step(batches_of("dense")[0])
    run.save(folder / "step-00000001")
    return folder, run


def test_show_says_what_it_is(saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = saved
    assert main(["checkpoint", "show", str(folder), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert (
        "after step 1" in text
        and "s.replicate" in text
        and "optimizer.embed.weight.exp_avg" in text
    )
    assert main(["checkpoint", "show", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    elements = sum(tensor.numel() for tensor in run.parameters().values())
    assert facts["sections"]["model"]["elements"] == elements
    assert facts["steps"] == 1 and facts["optimizers"] == ["AdamW"]


def test_verify_finds_every_damaged_tensor(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "all as they were written" in capsys.readouterr().out
    file = folder / "step-00000001" / "__1_0.distcp"
    good = file.read_bytes()
    damaged = bytearray(good)
    for at in (len(good) // 3, len(good) // 2):
        damaged[at] ^= 4
    file.write_bytes(damaged)
    assert main(["checkpoint", "verify", str(folder), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert not facts["whole"] and len(facts["problems"]) == 2
    file.write_bytes(good)


def test_convert_writes_what_torch_reads(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = saved
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "all.pt")]) == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    params = run.parameters()
    assert found["model"].keys() == params.keys() and found["steps"] == 1
    assert all(torch.equal(found["model"][name], params[name]) for name in params)
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "w.safetensors")]) == 0
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == params.keys()
    assert all(torch.equal(weights[name], params[name]) for name in params)
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "all.zip")]) == 2
    assert "has no known ending" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["w.safetensors", "all.pt"])
def test_what_cannot_be_converted_replaces_nothing(
    file: str, saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved[0], tmp_path / "run")
    for damaged in (tmp_path / "run").glob("*/*.distcp"):
        damaged.write_bytes(b"damaged")
    (tmp_path / file).write_bytes(b"mine")
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / file)]) == 2
    assert "distcp has ended after" in capsys.readouterr().err
    assert (tmp_path / file).read_bytes() == b"mine"
    full = OSError(28, "No space left on device")
    with mock.patch("piper.runtime.state.convert.os.replace", side_effect=full):
        assert main(["checkpoint", "convert", str(saved[0]), str(tmp_path / file)]) == 2
    assert f"{file} cannot be written: No space left" in capsys.readouterr().err
    assert (tmp_path / file).read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", file])


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _layer(dtype: torch.dtype) -> nn.Module:
    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0].register_buffer("a", torch.ones(3, dtype=dtype))
    return layer


def test_convert_places_elements_at_multiples_of_their_size(tmp_path: Path) -> None:
    program = piper.trace(partial(_layer, torch.bool), torch.randn(4, 2), _step)
    with program.lower().launch("single") as run:
        run.save(tmp_path / "run")
        state = run.state_dict()
    out = tmp_path / "w.safetensors"
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(out)]) == 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(out).items())
    for name, tensor in file_index(str(out)).items():
        assert tensor.pieces[0].offset % dtype_bytes(tensor.dtype) == 0, name


def test_a_dtype_that_safetensors_do_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = piper.trace(partial(_layer, torch.complex128), torch.randn(4, 2), _step)
    with program.lower().launch("single") as run:
        run.save(tmp_path / "run")
    for file, code in (("w.safetensors", 2), ("all.pt", 0)):
        out = str(tmp_path / file)
        assert main(["checkpoint", "convert", str(tmp_path / "run"), out]) == code
    assert "0.a is complex128, which safetensors do not have" in capsys.readouterr().err
    assert not (tmp_path / "w.safetensors").exists()


def test_a_folder_without_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
