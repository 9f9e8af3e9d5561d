"""Parameters that are cut in blocks: what is kept, written and read of them is that of whole tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.directives.shard_tensor import ShardTensor
from piper.ir.layouts import Split
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verdict import verify
from piper.training.verify import compare
from tests.resuming import same, state_of
from tests.tensor_zoo import batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")

TP: dict[str, Any] = {"tp": 2}
DP: dict[str, Any] = {"dp": 2}
TP_ZERO3: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 3}
TP4_ZERO1: dict[str, Any] = {"tp": 4, "dp": 2, "zero": 1}
QKV = "blocks.0.attention.qkv.weight"


@cache
def _job(name: str, **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW, ema=0.9)


def _everything(run: Run) -> dict[str, Tensor]:
    averages = {f"{name}:average": tensor for name, tensor in run.ema().items()}
    buffers = {f"{name}:buffer": tensor for name, tensor in run.buffers().items()}
    return {**state_of(run), **averages, **buffers}


@pytest.mark.parametrize("name", ["fused", "columns", "grouped"])
def test_initial_weights_are_those_of_one_device(name: str) -> None:
    with _job(name).launch("loopback") as run:
        wanted = run.parameters()
    for degrees in (TP, TP_ZERO3, TP4_ZERO1):
        with _job(name, **degrees).launch("loopback") as run:
            assert same(run.parameters(), wanted)
            assert same(run.masters(), wanted)


@pytest.mark.parametrize("name", ["fused", "columns", "grouped"])
def test_state_comes_back_under_other_strategies(name: str, tmp_path: Path) -> None:
    """From blocks to whole tensors, to shards that begin in the middle of blocks, and back."""
    batches = batches_of(name)
    ways = [TP, DP, TP_ZERO3, {"tp": 2, "sp": True, "pp": 2, "microbatches": 2}, TP]
    kept: dict[str, Tensor] = {}
    for number, degrees in enumerate(ways):
        job = _job(name, **degrees)
        before = tmp_path / str(number - 1)
        with job.resume(before, "loopback") if number else job.launch("loopback") as run:
            if number:
                assert same(_everything(run), kept), degrees
            run.step(batches[number % len(batches)])
            run.save(tmp_path / str(number))
            kept = _everything(run)
            assert any("exp_avg" in key for key in kept)


def test_gradients_are_whole() -> None:
    found = []
    for degrees in ({}, TP, TP_ZERO3):
        with _job("fused", **degrees).launch("loopback") as run:
            run.step(batches_of("fused")[0])
            found.append(run.gradients())
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("degrees", [TP, TP_ZERO3], ids=str)
@pytest.mark.parametrize("name", ["columns", "grouped"])
def test_weights_go_out_and_come_in(name: str, degrees: dict[str, Any], tmp_path: Path) -> None:
    with _job(name, **degrees).launch("loopback") as run:
        run.step(batches_of(name)[0])
        run.save_weights(tmp_path)
        wanted = run.parameters()
    memory = {name: tensor.clone() for name, tensor in wanted.items()}
    program = program_of(name)
    for weights in (tmp_path, memory):
        for other in ({}, TP, TP_ZERO3):
            again = program.apply(parallel(**other)).lower(optimizer=ADAMW, weights=weights)
            with again.launch("loopback") as run:
                assert same(run.parameters(), wanted), other


def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with _job("columns", **TP_ZERO3).launch("loopback") as run:
        run.step(batches_of("columns")[0])
        run.save(tmp_path / "saved")
        wanted = run.parameters()
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt", weights_only=True)["model"], wanted)


def test_an_evaluation_shares_them() -> None:
    batch = batches_of("fused")[1]
    found = []
    for degrees in ({}, TP, TP_ZERO3):
        with _job("fused", **degrees).launch("loopback") as run:
            run.step(batches_of("fused")[0])
            found.append(run.evaluate(batch).loss)
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_blocks_of_the_users_own() -> None:
    """Patterns with blocks are what "auto" finds; a copy of the history is the same program."""
    found = program_of("fused").apply(parallel(**TP))
    directive = next(r.directive for r in found.history if isinstance(r.directive, ShardTensor))
    assert isinstance(directive.params, dict) and directive.params[QKV.replace("0", "*")] == (0, 3)

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=1, dp=1, ep=1, tp=2)
        s.place(piper.where(), mesh.at(pp=0))
        s.replicate(piper.where(), over=("dp", "ep"))
        s.shard_tensor(
            piper.where(),
            over="tp",
            params={
                "*.qkv.*": [0, [8, 8, 8]],
                "*.[od]*.weight": -1,
                "*.gate.*": 0,
                "*.up.*": 0,
                "embed.weight": 0,
                "head.weight": 0,
            },  # type: ignore[dict-item]
        )
        s.split(piper.where(), "MB", 1)

    own = program_of("fused").apply(strategy).lower(optimizer=ADAMW).plan
    plan = found.lower(optimizer=ADAMW).plan
    assert own.tensors == plan.tensors
    assert dict(own.tensors[QKV].cut) == {"tp": Split(0, 3)}
    scope: dict[str, Any] = {}
    exec(found.history_as_code(), scope)
    again = program_of("fused").apply(scope["strategy"])
    assert again.history_as_code() == found.history_as_code()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("dense", {"*.up.weight": (0, 2), "*.gate.weight": 0, "*.down.weight": 1}),
        ("dense", {"*.down.weight": (1, (10, 6)), "positions.weight": (1, 2)}),
        ("tied", {"embed.weight": (0, (10, 6))}),
        ("fused", {"*.qkv.*": (0, 6), "*.o.weight": 1}),
        ("fused", {"*.qkv.weight": (0, 3), "*.norm1.weight": (0, 2)}),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit_the_code_are_exact(name: str, params: dict[str, Any]) -> None:
    """They cost a gather, or an operator takes its part of the whole."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(dp=2, tp=2)
        s.place(piper.where(), mesh.at())
        s.replicate(piper.where(), over="dp", zero=3)
        s.shard_tensor(piper.where(), over="tp", params=params)

    job = program_of(name).apply(strategy).lower(optimizer=ADAMW)
    with job.launch("loopback") as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def test_gpt2_of_hugging_face_is_exact() -> None:
    """Its queries, keys and values are columns of one matrix [in, 3 * out]."""
    pytest.importorskip("transformers")
    from tests.zoo_hf import ZOO

    tiny = ZOO["gpt2"]()
    torch.manual_seed(0)
    batches = [doubled(tiny.batch()) for _ in range(2)]
    program = piper.trace(doubled_model(tiny.make_model), batches[0], tiny.step)
    for degrees in (TP, {"tp": 2, "sp": True, "dp": 2, "zero": 3}):
        applied = program.apply(parallel(**degrees))
        cut = applied.lower(optimizer=ADAMW).plan.tensors["transformer.h.0.attn.c_attn.weight"].cut
        assert dict(cut) == {"tp": Split(1, 3)}
        verdict = verify(applied, batches)
        assert verdict.exact, verdict
