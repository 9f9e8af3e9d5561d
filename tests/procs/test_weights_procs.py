"""Weights in and out on processes: each rank is sent or reads what it holds, and writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import piper
from piper.cli.main import main
from piper.errors import PlanError
from piper.runtime.launch.local_pool import LocalPool
from piper.strategies import parallel
from tests.procs.conftest import GetPool
from tests.procs.tiny import Model, batch, step
from tests.zoo import ADAMW, batches_of, program_of
from tests.zoo_hf import ZOO

pytestmark = pytest.mark.xdist_group("procs")
ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).with_name("tiny.py"))
PARTS = parallel(pp=2, dp=2, ep=2, zero=3, microbatches=2)


def _state(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = program_of("moe").source.make_model().state_dict()
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 4
        for name, tensor in state.items()
    }


def test_a_state_dict_is_sent_in_the_parts_that_ranks_hold(
    pool: GetPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = _state()
    total = sum(tensor.numel() for tensor in state.values())
    sent: list[int] = []
    real = LocalPool.call

    def counted(self: LocalPool, command: str, payloads: Any) -> list[Any]:
        if command == "load":
            given = [payload["given"].elements.values() for payload in payloads]
            sent.extend(sum(t.untyped_storage().nbytes() // 8 for t in mine) for mine in given)
        return real(self, command, payloads)

    monkeypatch.setattr(LocalPool, "call", counted)
    job = program_of("moe").apply(PARTS).lower(weights=state, optimizer=ADAMW)
    batch = batches_of("moe")[0]
    with job.launch(pool(4)) as run:
        assert sum(sent) == total and max(sent) < 0.3 * total
        for name, tensor in run.parameters().items():
            assert torch.equal(tensor, state[name]), name
        run.evaluate(batch)
        assert sum(sent) == total, "an evaluation needs nothing more"
        run.step(batch)
        run.save_weights(tmp_path, shard_size="4KB")
        trained = run.state_dict()
    again = program_of("moe").apply(PARTS).lower(weights=tmp_path, optimizer=ADAMW)
    with monkeypatch.context() as patch:
        patch.setattr(LocalPool, "call", real)
        with again.launch(pool(4)) as run:
            found = run.state_dict()
            assert sum(run.bytes_read()) == 8 * total
            assert max(run.bytes_read()) < 0.3 * 8 * total
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def test_a_llama_folder_on_processes(pool: GetPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = ZOO["llama"]()
    torch.manual_seed(1)
    model, batch = tiny.make_model(), tiny.batch()
    model.save_pretrained(tmp_path / "in")
    program = piper.trace(tiny.make_model, batch, tiny.step)
    job = program.apply(parallel(pp=2, dp=2, zero=3, microbatches=2)).lower(
        weights=tmp_path / "in", optimizer=piper.sgd(lr=0.1)
    )
    with job.launch(pool(4)) as run:
        total = sum(param.numel() * 4 for param in model.parameters())
        assert sum(run.bytes_read()) == pytest.approx(total, rel=0.01)
        run.step(batch)
        run.save_weights(tmp_path / "out")
    tiny.step(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found, wanted = (each(batch["input_ids"]).logits for each in (again, model))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_saved_job_knows_where_its_weights_lie(
    pool: GetPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(_state(), tmp_path / "w.pt")
    monkeypatch.chdir(tmp_path)
    program = program_of("moe").apply(PARTS)
    program.lower(weights="w.pt").save("job.json")
    monkeypatch.chdir("/")
    with piper.load_job(tmp_path / "job.json").launch(pool(4)) as run:
        found = run.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in _state().items())
    with pytest.raises(PlanError, match="starts from a state_dict in memory"):
        program.lower(weights=_state()).save(tmp_path / "other.json")
    file = json.loads((tmp_path / "job.json").read_text())
    for damage in ({"shape": [3]}, {"dtype": "float7"}):
        bad = {**file, "weights": {k: {**v, **damage} for k, v in file["weights"].items()}}
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(PlanError, match=r"stored as float7|weights that are not its own"):
            piper.load_job(tmp_path / "bad.json")


def _tiny_weights(path: Path) -> dict[str, torch.Tensor]:
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    state = {name: torch.full((4, 4) if "weight" in name else (4,), 0.1) for name in names}
    torch.save(state, path)
    return state


def test_the_command_line_takes_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _tiny_weights(tmp_path / "w.pt")
    options = ["--pp", "2", "--dp", "2", "--weights", str(tmp_path / "w.pt"), "--json"]
    assert main(["verify", TINY, *options]) == 0
    assert json.loads(capsys.readouterr().out)["exact"]
    assert main(["train", TINY, *options, "--steps", "1", "--launch", "loopback"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loss = next(line["loss"] for line in lines if "loss" in line)
    model = Model()
    model.load_state_dict(state)
    assert loss == pytest.approx(step(model, batch(0)).item(), rel=1e-6)
    torch.save({"layers.0.weight": torch.zeros(4, 4)}, tmp_path / "w.pt")
    assert main(["train", TINY, *options, "--steps", "1"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "missing   3: layers.0.bias, layers.1.bias" in "\n".join(found["details"])


def test_ranks_of_torchrun_read_and_write(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "w.pt")
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        + ["-m", "tests.procs.weights_torchrun", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("as it was") == 4  # ranks may write into one line
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in _state().items())


def test_initial_weights_do_not_depend_on_the_default_dtype_of_a_process(pool: GetPool) -> None:
    """A model made where the default is float64 starts alike in processes where it is float32."""

    def make_model() -> nn.Module:
        model = nn.Linear(8, 8)
        model.bias = nn.Parameter(torch.randn(8) + torch.zeros(8))
        return model

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        batch = {"x": torch.ones(4, 8)}
        program = piper.trace(make_model, batch, lambda m, b: m(b["x"]).square().mean())
        job = program.apply(parallel(dp=2)).lower()
        with job.launch("loopback") as run:
            wanted = run.parameters()
        with job.launch(pool(2)) as run:
            found = run.parameters()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
