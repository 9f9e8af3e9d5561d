"""The command line: what it prints and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper.cli.main import main
from piper.compiler import source
from piper.plan.optimizers import Grouping
from piper.plan.types import plan_from_json

EXAMPLES = Path(__file__).parents[2] / "examples"
PP_DP_EP = ["--pp", "2", "--dp", "2", "--ep", "2", "--schedule", "1f1b", "--microbatches", "2"]


def test_plan_shows_directives_and_writes_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(EXAMPLES / "moe.py"), *PP_DP_EP, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "s.shard(where(EP='*'), over='ep')" in printed
    assert main(["plan", str(EXAMPLES / "moe.py"), *PP_DP_EP, "--tasks"]) == 0
    tasks = capsys.readouterr().out
    assert "all_to_all rows0>F[PP=0,EP=0,MB=0]" in tasks and "waits" in tasks and "frees" in tasks
    plan = plan_from_json(out.read_bytes())
    assert plan.content_hash() in printed
    saved = json.loads(out.read_text())
    assert set(plan.bodies) | set(saved["evaluation"]["bodies"]) == set(saved["code"])


def test_precisions_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "moe.py")
    assert main(["plan", file, "--dp", "2", "--precision", "bf16-pure"]) == 0
    assert "precision bf16-pure" in capsys.readouterr().out
    assert main(["plan", file, "--dp", "2"]) == 0
    assert "precision as written" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["plan", file, "--precision", "bf16-pur"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--precision" in error and "bf16-pur" in error
    assert all(name in error for name in ("fp32", "bf16", "bf16-wire", "bf16-pure"))


GROUPED = """
import torch
from tests.procs.tiny import batch, model, step

def optimizer(model):
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    rest = torch.optim.AdamW([{"params": biases[:1], "lr": 0.1}, {"params": biases[1:]}])
    return [torch.optim.SGD(weights, lr=0.5), rest]
"""


def test_verify_trains_with_the_optimizer_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "grouped.py"
    file.write_text(GROUPED)
    arguments = ["verify", str(file), "--dp", "2", "--zero", "3"]
    assert main(arguments) == 0
    assert "3 SGD and AdamW steps" in capsys.readouterr().out
    real = source.resolve_optimizer

    def ignoring(*args: Any, **more: Any) -> Grouping:
        found = real(*args, **more)
        return Grouping(found.groups, dict.fromkeys(found.of, 0))

    monkeypatch.setattr(source, "resolve_optimizer", ignoring)
    assert main(arguments) == 1
    assert "parameter  largest error" in capsys.readouterr().out


def test_verify_says_exact_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLES / "moe.py"), *PP_DP_EP, "--adversary", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] and found["gradient"] <= 1e-10 and found["differing_replicas"] == []


NARROW = """
import torch

def model():
    return torch.nn.Linear(4, 4)

def batch():
    return torch.randn(8, 4)

def step(model, batch):
    return model(batch).float().square().mean()
"""


def test_verify_says_where_a_model_leaves_float64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "narrow.py"
    file.write_text(NARROW)
    assert main(["verify", str(file), "--dp", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("exact\n")
    assert f"float32    lifted to float64 above: 1\n             {file}:11 float in step" in printed
    assert re.search(r"as written loss [\de.+-]+, gradient .* bound 1e-06  ok", printed)
    assert main(["verify", str(file), "--dp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float64" and found["bounds"]["gradient"] == 1e-10
    assert found["as_written"]["dtype"] == "float32"
    (island,) = found["islands"]
    assert (island["source"], island["operator"]) == (f"{file}:11", "float")


def test_verify_ends_with_1_above_the_bounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that forgets to average over the data ranks is caught."""
    from piper.runtime.worker.update import Updater

    step = Updater.step
    monkeypatch.setattr(
        Updater, "step", lambda self, grads, divisor, scale: step(self, grads, divisor / 2, scale)
    )
    assert main(["verify", str(EXAMPLES / "dense.py"), "--dp", "2", "--steps", "1"]) == 1
    assert "ABOVE THE BOUND" in capsys.readouterr().out


def test_a_strategy_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from piper import where\n\n\ndef strategy(s):\n"
        "    s.mesh(dp=4)\n    s.replicate(where(), over='dp')\n"
    )
    arguments = ["plan", str(EXAMPLES / "dense.py"), "--strategy", str(file), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_ranks"] == 4 and found["mesh"] == {"dp": 4}


def test_help_needs_no_torch() -> None:
    code = "import sys; from piper.cli.main import main\ntry: main(['--help'])\n" \
        "except SystemExit: pass\nassert 'torch' not in sys.modules"  # fmt: skip
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.perf_counter() - start < 2.0
