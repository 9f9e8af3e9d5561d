"""`piper checkpoint show|verify|convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import piper
from piper.api.run import Run
from piper.cli.main import main
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


def test_a_folder_without_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
