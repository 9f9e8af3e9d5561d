"""Runs that are saved go on under any other strategy, as if they had never stopped."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.errors import FileError
from piper.stored.manifest import read_manifest
from piper.stored.writers import entries_by_rank
from piper.strategies import parallel
from tests.zoo import batches_of, program_of

CASE = "dropout"
DEGREES: dict[str, dict[str, Any]] = {
    "one": {},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 4, "zero": 3},
    "pp2": {"pp": 2},
    "ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "small buckets": {"pp": 2, "dp": 2, "zero": 3, "bucket_size": "1KiB"},
}
PAIRS = [("one", "zero3"), ("zero3", "pp2"), ("ep2", "zero1"), ("zero1", "ep2"),
         ("pp2", "small buckets"), ("small buckets", "one")]  # fmt: skip


def _job(degrees: str, case: str = CASE, **lowered: Any) -> Job:
    options = DEGREES[degrees]
    program = program_of(case).apply(parallel(microbatches=8 // options.get("dp", 1), **options))
    settings = {"optimizer": piper.adamw(lr=1e-2), "clip": 0.5, "ema": 0.5}
    return program.lower(**{**settings, **lowered})


def _launched(job: Job) -> Run:
    return job.launch("single" if job.plan.mesh.size == 1 else "loopback")


def _resumed(job: Job, folder: Path) -> Run:
    return job.resume(folder, "single" if job.plan.mesh.size == 1 else "loopback")


def _everything(run: Run) -> dict[str, torch.Tensor]:
    state = {f"{n}:{k}": t for n, kept in run.optimizer_state().items() for k, t in kept.items()}
    averages = {f"{name}:average": tensor for name, tensor in run.ema().items()}
    masters = {f"{name}:master": tensor for name, tensor in run.masters().items()}
    return {**run.parameters(), **run.buffers(), **masters, **averages, **state}


def _assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_under_another_strategy(tmp_path: Path, before: str, after: str) -> None:
    batches = [*batches_of(CASE), *batches_of(CASE)][:4]
    with _launched(_job("one")) as run:
        wanted = [run.step(batch) for batch in batches]
        last = run.parameters()
    with _launched(_job(before)) as run:
        losses = [run.step(batch).loss for batch in batches[:2]]
        run.save(tmp_path / "saved")
        kept = _everything(run)
    with _resumed(_job(after), tmp_path / "saved") as run:
        assert run.steps == 2
        _assert_equal(_everything(run), kept)
        losses += [run.step(batch).loss for batch in batches[2:]]
        assert run.differing_replicas() == []
        for name, param in run.parameters().items():
            assert (param - last[name]).norm() <= 1e-9 * last[name].norm(), name
    for loss, one in zip(losses, wanted, strict=True):
        assert abs(loss - one.loss) <= 1e-9 * abs(one.loss)


def test_without_the_state_it_would_go_on_otherwise(tmp_path: Path) -> None:
    """What the test above holds: steps from the same weights without optimizer state are others."""
    batches = batches_of(CASE)
    with _launched(_job("one")) as run:
        for batch in batches[:2]:
            run.step(batch)
        run.save(tmp_path / "saved")
        wanted = run.step(batches[2]).loss
        moved = run.parameters()
    path = tmp_path / "saved" / "piper.json"
    manifest = read_manifest(path.parent)
    assert any(path[0] == "optimizer" for path in manifest.paths.values())
    with _resumed(_job("one"), path.parent) as run:
        for worker in run.workers.workers:
            for updater in worker.updaters.values():
                for optimizer in updater.optimizers.values():
                    optimizer.state.clear()
        assert run.step(batches[2]).loss == wanted
        now = run.parameters()
        assert any((now[n] - moved[n]).norm() > 1e-6 * moved[n].norm() for n in moved)


@pytest.mark.parametrize("case", ["tied", "branches", "integers"])
def test_models_of_all_kinds_come_back(tmp_path: Path, case: str) -> None:
    with _launched(_job("small buckets", case)) as run:
        run.step(batches_of(case)[0])
        run.save(tmp_path / "saved")
        kept = _everything(run)
    with _resumed(_job("zero1", case), tmp_path / "saved") as run:
        _assert_equal(_everything(run), kept)


class _Odd(nn.Module):
    """Running statistics, a frozen and an unused parameter, a name that no path likes, one number."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = norm(8)
        self.layers = nn.ModuleDict({"a/b c": nn.Linear(8, 8)})
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        with piper.annotate("PP"):
            return self.layers["a/b c"](x) * self.scale


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_statistics_frozen_and_unused_tensors_come_back(
    tmp_path: Path, precision: str | None
) -> None:
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d if precision is None else nn.LayerNorm
    program = piper.trace(lambda: _Odd(norm), batch, lambda m, b: m(b).square().mean())

    def job(**degrees: Any) -> Job:
        more = {} if precision is None else {"precision": precision}
        strategy = parallel(microbatches=4 // degrees.get("dp", 1), **degrees)
        return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-2), ema=0.5, **more)

    with _launched(job(dp=2, zero=3)) as run:
        for _ in range(2):
            run.step(batch)
        run.save(tmp_path / "saved")
        kept = _everything(run)
        losses = [run.step(batch).loss, run.evaluate(batch).loss]
    assert precision or kept["norm.num_batches_tracked"] == 8
    assert kept["unused"].shape == (3, 5)
    with _resumed(job(dp=2), tmp_path / "saved") as run:  # statistics see ranks in the same order
        _assert_equal(_everything(run), kept)
        found = [run.step(batch).loss, run.evaluate(batch).loss]
    assert found == pytest.approx(losses, rel=1e-6)


def test_every_element_is_written_once() -> None:
    for degrees in DEGREES:
        plan = _job(degrees).plan
        entries = [e for mine in entries_by_rank(plan) for e in mine]
        for section, wanted in (("model", plan.tensors), ("ema", plan.tensors)):
            for name in wanted:
                found = [e for e in entries if e.section == section and e.tensor == name]
                num = sum(e.part.num_elements if e.whole else e.last - e.first for e in found)
                assert num == torch.Size(plan.tensors[name].shape).numel(), (degrees, name)


def test_ranks_share_the_writing() -> None:
    by_rank = entries_by_rank(_job("zero1").plan)
    sizes = [sum(e.last - e.first for e in mine) for mine in by_rank]
    assert min(sizes) > 0.8 * max(sizes)


def test_before_the_first_step_there_is_no_state(tmp_path: Path) -> None:
    with _launched(_job("zero3")) as run:
        run.save(tmp_path / "saved")
        first = run.step(batches_of(CASE)[0]).loss
    with _resumed(_job("pp2"), tmp_path / "saved") as run:
        assert run.steps == 0
        assert run.step(batches_of(CASE)[0]).loss == pytest.approx(first, rel=1e-12)


def test_training_goes_on_while_ranks_write(tmp_path: Path) -> None:
    batches = batches_of(CASE)
    with _launched(_job("zero3")) as run:
        run.step(batches[0])
        kept = _everything(run)
        saving = run.save(tmp_path / "saved", wait=False)
        run.step(batches[1])
        assert not (tmp_path / "saved").exists() or saving.done()
        assert saving.wait() == tmp_path / "saved"
    with _resumed(_job("one"), tmp_path / "saved") as run:
        _assert_equal(_everything(run), kept)


def test_torch_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with _launched(_job("ep2")) as run:
        run.step(batches_of(CASE)[0])
        run.save(tmp_path / "saved")
        params, state = run.parameters(), run.optimizer_state()
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["model"].keys() == params.keys()
    assert all(torch.equal(found["model"][name], params[name]) for name in params)
    for name, kept in state.items():
        for key, tensor in kept.items():
            assert torch.equal(found["optimizer"][name][key], tensor)
    name = max(params, key=lambda name: params[name].numel())
    mine = {f"model.{name}": torch.zeros_like(params[name])}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(mine, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert torch.equal(mine[f"model.{name}"], params[name])


def test_set_options_come_back(tmp_path: Path) -> None:
    batches = batches_of(CASE)
    with _launched(_job("one")) as run:
        run.set_options({"lr": 0.3})
        run.step(batches[0])
        run.save(tmp_path / "saved")
        run.step(batches[1])
        wanted = run.parameters()
    with _resumed(_job("one"), tmp_path / "saved") as run:
        run.step(batches[1])
        _assert_equal(run.parameters(), wanted)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [({}, {"lr": 0.5}), ({"weight_decay": 0.3}, {"lr": 0.5}), ({"lr": 0.2}, {})],
    ids=lambda case: "-".join(case) or "nothing",
)
def test_set_options_come_back_unless_they_are_written_anew(
    tmp_path: Path, changed: dict[str, float], wanted: dict[str, float]
) -> None:
    written: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9)}  # in a file, betas are a list
    with _launched(_job("one", optimizer=partial(torch.optim.AdamW, **written))) as run:
        run.set_options({"lr": 0.5})
        run.step(batches_of(CASE)[0])
        run.save(tmp_path / "saved")
    job = _job("one", optimizer=partial(torch.optim.AdamW, **{**written, **changed}))
    with _resumed(job, tmp_path / "saved") as run:
        assert run.workers.now == [wanted]


def _damaged(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_found(tmp_path: Path) -> None:
    job = _job("one")
    with _launched(job) as run:
        run.save(tmp_path / "saved")
    manifest = tmp_path / "saved" / "piper.json"
    good = manifest.read_bytes()
    for at in (3, 40, len(good) - 3):
        _damaged(manifest, at)
        with pytest.raises(FileError, match="damaged"):
            job.resume(tmp_path / "saved", "single")
        manifest.write_bytes(good)
    file = tmp_path / "saved" / "__0_0.distcp"
    _damaged(file, file.stat().st_size // 2)
    with pytest.raises(piper.errors.PiperError, match="not those that were written"):
        job.resume(tmp_path / "saved", "single")


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    with _launched(_job("one")) as run:
        run.step(batches_of(CASE)[0])
        run.save(tmp_path / "saved")
    with pytest.raises(FileError) as refused:
        _resumed(_job("one", optimizer=piper.sgd(lr=0.1), seed=3, case="deep"), tmp_path / "saved")
    text = str(refused.value)
    assert "is not of this job" in text and "is missing in it" in text
    for changed, words in (
        ({"optimizer": piper.sgd(lr=0.1)}, "was trained by AdamW, here by SGD"),
        ({"seed": 3}, "its seed is 0, this job's 3"),
    ):
        with pytest.raises(FileError, match=words):
            _resumed(_job("one", **changed), tmp_path / "saved")
    with pytest.raises(FileError, match="has no checkpoint"):
        _resumed(_job("one"), tmp_path)


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    import zlib

    with _launched(_job("one")) as run:
        run.save(tmp_path / "saved")
    path = tmp_path / "saved" / "piper.json"
    _, body = path.read_bytes().split(b"\n", 1)
    changed = json.loads(body) | {"format": 9}
    body = json.dumps(changed).encode()
    path.write_bytes(b'{"crc": %d}\n' % zlib.crc32(body) + body + b"\n")
    with pytest.raises(FileError, match="is of format 9"):
        _resumed(_job("one"), tmp_path / "saved")


def test_disk_full_is_one_error_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import piper.runtime.state.write_pieces as written

    written_so_far = itertools.count()

    def full(file: Any, data: memoryview) -> None:
        if next(written_so_far) > 5:
            raise OSError(28, "No space left on device")
        file.write(data)

    batches = batches_of(CASE)
    with _launched(_job("zero1")) as run:
        run.step(batches[0])
        run.save(tmp_path / "good")
        monkeypatch.setattr(written, "_write_all", full)
        with pytest.raises(FileError, match="No space left on device"):
            run.save(tmp_path / "bad")
        assert [path.name for path in tmp_path.iterdir()] == ["good"]
        assert run.step(batches[1]).loss > 0
