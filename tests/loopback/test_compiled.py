"""Bodies through Inductor: they train like one device, are compiled once, and fall back to eager.

A compiler for C++ takes about a second per kernel, so that few models are compiled here by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import piper
from piper.api.job import Job
from piper.bodies.files.codec import encode
from piper.bodies.inductor.compiled import Given, compile_bodies, trace_body
from piper.bodies.store import load
from piper.plan.types import bind
from piper.training.verify import Errors, Trained, compare, train_one_device
from tests.strategies import strategy_of
from tests.zoo import (
    ADAMW,
    BATCH,
    LENGTH,
    WIDTH,
    MoE,
    batches_of,
    program_of,
    reference_of,
)
from tests.zoo import CASES as CASES_OF_ZOO

pytestmark = [pytest.mark.xdist_group("compiled"), pytest.mark.timeout(600)]
LONG = "compiling takes minutes: PIPER_LONG=1 runs it"
long = pytest.mark.skipif("PIPER_LONG" not in os.environ, reason=LONG)
CASES = [
    ("dropout", "pp2_ep2", "zb_h1", 3, ""),
    ("dense", "pp2", "1f1b", 0, "nothing"),
    ("deep_dense", "pp2_dp2", "zbv", 1, ""),
    ("deep_moe", "pp2_ep2", "dualpipev", 2, ""),
    ("deep_dropout", "pp2_ep2", "dualpipev", 3, "expensive"),
    ("tied", "pp2_dp2", "zb_h1", 2, ""),
    ("counted", "dp2", "none", 1, ""),
]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cold cache for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("PIPER_CACHE", str(path))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield path


@long
@pytest.mark.parametrize(("name", "degrees", "schedule", "zero", "recompute"), CASES)
def test_the_zoo_trains_like_one_device(
    name: str, degrees: str, schedule: str, zero: int, recompute: str
) -> None:
    more: dict[str, Any] = {"recompute": recompute} if recompute else {}
    strategy = strategy_of(degrees, schedule, zero=zero, **more)
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW)
    errors = _errors(job, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


class Small(nn.Module):
    """Experts and dropout in two stages, and little else that would have to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(MoE() for _ in range(2))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for stage in self.stages:
            with piper.annotate("PP"):
                x = F.dropout(torch.tanh(x + stage(x, batch["route"])), 0.3)
        return x


def _small_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "route": CASES_OF_ZOO["moe"].batch(seed)["route"]}


def test_sharded_experts_with_dropout_and_halves_train_like_one_device() -> None:
    program = piper.trace(
        lambda: Small().double(), _small_batch(0), lambda model, batch: model(batch).square().mean()
    )
    job = program.apply(strategy_of("pp2_ep2", "zb_h1", zero=3)).lower(optimizer=ADAMW)
    assert {"BI", "BW"} <= {task.phase for task in job.plan.classes[0].tasks if task.kind == "run"}
    batches = [_small_batch(seed) for seed in range(3)]
    errors = _errors(job, batches, train_one_device(job, batches))
    assert errors.exact, errors


def _errors(job: Job, batches: list[Any], reference: Trained) -> Errors:
    with job.launch("loopback", adversary=True, seed=7, compile=True) as run:
        workers: Any = run.workers
        functions = [f for worker in workers.workers for f in worker.functions.values()]
        assert all(f.__module__ == "piper.bodies.inductor.compiled" for f in functions), (
            "some are eager"
        )
        return compare(run, batches, reference)


class Attention(nn.Module):
    """Two heads: attention's result, which is saved, does not lie contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(2, 4, 8) + torch.tensor([1.0, 2.0] * 4) * self.scale


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="its Inductor takes float64 attention's sums for float32"
)
def test_results_lie_as_eager_ones_do() -> None:
    program = piper.trace(
        lambda: Attention().double(),
        {"x": torch.randn(2, 4, 8, dtype=torch.float64)},
        lambda model, batch: model(batch["x"]).square().mean(),
    )
    job = program.lower(optimizer=ADAMW)
    me = bind(job.plan, 0)
    slots: dict[int, Tensor] = {}
    kinds, strange = [], 0
    for task in (task for task in me.tasks if task.kind == "run"):
        text = job.bodies[task.body]
        for i in task.reads:
            slot = me.slots[i]
            made = torch.randn(slot.shape, dtype=torch.float64).to(getattr(torch, slot.dtype))
            slots.setdefault(i, made)
        inputs = [slots[i] for i in task.reads]
        given = tuple(Given(tuple(t.shape), me.slots[i].dtype, None, _strides(t))
                      for i, t in zip(task.reads, inputs, strict=True))  # fmt: skip
        body = trace_body(text, given, "cpu")
        assert body.graph is not None
        kinds += [str(node.target) for node in body.graph.module.graph.nodes]
        compile_bodies({body: task.name})
        before = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            wanted, found = load(text)([*inputs]), body.function([*inputs])
        assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
        assert body.strides == tuple(_strides(result) for result in wanted)
        for mine, other in zip(found, wanted, strict=True):
            assert mine.stride() == other.stride()
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
        memory = [t.untyped_storage().data_ptr() for t in (*inputs, *found)]
        assert len(set(memory[len(inputs) :])) == len(found)
        assert not set(memory[: len(inputs)]) & set(memory[len(inputs) :])
        strange += sum(strides is not None for strides in body.strides)
        slots |= dict(zip(task.writes, found, strict=True))
    assert sum("scaled_dot_product" in kind for kind in kinds) == 2  # forward and backward
    assert strange, "all results were contiguous"


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    return None if tensor.is_contiguous() else tensor.stride()


def _text(function: Any, *examples: Tensor) -> str:
    graph: fx.Graph = make_fx(function)(*examples).graph
    return encode(graph)


def test_any_number_of_rows() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) * 2
        return torch.mm(y, w), y.sum(0)

    text = _text(function, torch.randn(5, 4), torch.randn(4, 3))
    body = trace_body(text, (Given((5, 4), "float32", bound=40), Given((4, 3), "float32")), "cpu")
    compile_bodies({body: "F"})
    assert not body.problem
    w = torch.randn(4, 3)
    for rows in (0, 1, 2, 3, 5, 8, 40):
        x = torch.randn(rows, 4)
        for mine, other in zip(body.function([x, w]), load(text)([x, w]), strict=True):
            torch.testing.assert_close(mine, other)


def test_what_cannot_be_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", refuse)
    text = _text(lambda x: (x.cos() + 3,), torch.randn(3))
    body = trace_body(text, (Given((3,), "float32"),), "cpu")
    with pytest.warns(RuntimeWarning, match=r"body \w+ of F\[MB=0\] runs eagerly.*no compiler$"):
        compile_bodies({body: "F[MB=0]"})
    compile_bodies({body: "F[MB=1]"})  # says so once: a second warning would be an error here
    x = torch.randn(3)
    assert torch.equal(body.function([x])[0], x.cos() + 3)


_PROCESS = """
import json, sys, torch
from torch._dynamo.utils import counters
from piper.bodies.inductor.compiled import Given, compile_bodies, trace_body
body = trace_body(sys.argv[1], (Given((3, 4), "float32"),), "cpu")
compile_bodies({body: "F"})
assert not body.problem, body.problem
found = body.function([torch.ones(3, 4)])[0].sum().item()
kept = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps(kept | {"result": found}))
"""


def test_of_two_processes_that_start_together_one_compiles(folder: Path) -> None:
    text = _text(lambda x: (x.sin() * 0.125,), torch.randn(3, 4))
    command = [sys.executable, "-c", _PROCESS, text]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    assert sorted((f["hit"], f["miss"], f["bypass"]) for f in found) == [(0, 1, 0), (1, 0, 0)]
    assert found[0]["result"] == found[1]["result"]
    assert (folder / "inductor").is_dir()


def test_equal_bodies_of_a_process_are_one() -> None:
    text = _text(lambda x: (x + 1,), torch.randn(3))
    given = (Given((3,), "float32"),)
    assert trace_body(text, given, "cpu") is trace_body(text, given, "cpu")
