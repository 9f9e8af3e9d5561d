"""Buffers that forward changes: after every step they are those of one device, under every strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.errors import AxisError, TraceError
from piper.strategies import parallel
from piper.training.verify import Trained, compare, train_one_device

ROWS, WIDTH = 16, 6
BATCH = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(4).mean()


class _Staged(nn.Module):
    """Two stages around `change(model, y)`, which returns what the second one gets."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), change
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.change(self, self.a(x)) if self.training else self.a(x)
        with piper.annotate("PP"):
            return self.b(x.tanh()) * self.scale.mean()


def _run(
    make: Callable[[], nn.Module], steps: int = 3, *, compile: bool = False, **how: Any
) -> Any:
    """Losses, parameters and buffers of a strategy, and of the model's own code on one device that
    takes the microbatches of all data ranks one after the other."""
    program = piper.trace(lambda: make().double(), BATCH, _step)
    job = program.apply(parallel(**how)).lower(optimizer=piper.sgd(lr=0.1))
    reference = make().double()
    ranks, microbatches = how.get("dp", 1), how.get("microbatches", 1)
    pieces = BATCH.chunk(ranks * microbatches)
    for adversary in (False, True) if not compile else (False,):
        with job.launch("loopback", adversary=adversary, compile=compile) as run:
            held = {**run.parameters(), **run.buffers()}
            reference.load_state_dict(held, strict=False)
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            for _ in range(steps):
                loss = 0.0
                optimizer.zero_grad()
                for microbatch in range(microbatches):
                    for rank in range(ranks):
                        piece = pieces[rank * microbatches + microbatch]
                        mine = _step(reference, piece) / len(pieces)
                        mine.backward()
                        loss += mine.item()
                optimizer.step()
                assert abs(run.step(BATCH).loss - loss) < 1e-12
            wanted = reference.state_dict()
            for name, held_now in {**run.parameters(), **run.buffers()}.items():
                torch.testing.assert_close(held_now, wanted[name], rtol=1e-10, atol=1e-12)
            assert run.differing_replicas() == []
            changed = [name for name, b in run.buffers().items() if not torch.equal(b, held[name])]
            reference.eval()
            with torch.no_grad():
                evaluated = _step(reference, BATCH)
            assert abs(run.evaluate(BATCH).loss - evaluated.item()) < 1e-12
            reference.train()
    return changed


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8, 3),
        nn.BatchNorm1d(3, momentum=0.3, affine=False),
    )


HOW = [
    {},
    {"microbatches": 4},
    {"dp": 2, "microbatches": 2},
    {"dp": 4, "microbatches": 1, "zero": 3},
    {"pp": 2, "dp": 2, "microbatches": 2, "zero": 2, "schedule": "zb_h1"},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_running_statistics(how: dict[str, Any]) -> None:
    changed = _run(_norms, **how)
    assert len(changed) == 3 + 2 + 3, "an instance norm counts no batches"


def _four() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)))


def test_running_statistics_of_a_v_schedule() -> None:
    _run(_four, pp=2, microbatches=4, schedule="zbv")


@pytest.mark.skipif("PIPER_LONG" not in os.environ, reason="a minute: PIPER_LONG=1 runs it")
def test_running_statistics_of_compiled_bodies() -> None:
    _run(_four, dp=2, microbatches=2, compile=True)


def _added(model: Any, y: Tensor) -> Tensor:
    model.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    model.seen += 1
    return y


def _replaced(model: Any, y: Tensor) -> Tensor:
    model.mean = 0.9 * model.mean + 0.1 * y.detach().mean(0)
    model.seen = model.seen + 1
    model.mean = model.mean + torch.arange(6, dtype=y.dtype)
    return y


def _a_part(model: Any, y: Tensor) -> Tensor:
    model.mean.view(2, 3)[1].copy_(y.detach()[0, :3])
    return y


def _by_norm(model: Any, y: Tensor) -> Tensor:
    F.batch_norm(y.detach(), model.mean, model.mean + 1, training=True)
    return y


def _by_the_weights(model: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        model.mean.lerp_(model.a.bias, 0.1)
    return y


def _together(model: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        model.mean.add_(y.mean(0))
        model.seen.add_(model.mean.argmax())
    return y


@pytest.mark.parametrize(
    "change", [_added, _replaced, _a_part, _by_norm, _by_the_weights, _together]
)
@pytest.mark.parametrize("how", [{"pp": 2, "microbatches": 2}, {"dp": 2, "microbatches": 2}])
def test_buffers_that_nothing_reads(change: Any, how: dict[str, Any]) -> None:
    assert "mean" in _run(lambda: _Staged(change), **how)


def test_a_buffer_that_is_replaced_by_itself_is_not_changed() -> None:
    """`.to()` returns the tensor itself where there is nothing to do."""

    def moved(model: Any, y: Tensor) -> Tensor:
        model.mean = model.mean.to(y.dtype)
        return y + model.mean

    assert "mean" not in _run(lambda: _Staged(moved), dp=2, microbatches=2)


def _centred(model: Any, y: Tensor) -> Tensor:
    y = y - model.mean
    with torch.no_grad():
        model.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y


def _scaled(model: Any, y: Tensor) -> Tensor:
    model.seen += 1
    return y * model.seen.clone()


class _Spectral(_Staged):
    def __init__(self) -> None:
        super().__init__(lambda model, y: y)
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


@pytest.mark.parametrize(
    "make",
    [lambda: _Staged(_centred), lambda: _Staged(_scaled), _Spectral],
    ids=["mean", "count", "spectral"],
)
def test_buffers_that_the_next_microbatch_reads(make: Callable[[], nn.Module]) -> None:
    for schedule in ("1f1b", "zb_h1"):
        assert _run(make, pp=2, microbatches=4, schedule=schedule)
    with pytest.raises(AxisError, match=r"reads buffer .* ranks along dp cannot run at once"):
        _run(make, dp=2, microbatches=2)


@pytest.mark.parametrize("keep", ["nothing", "expensive"])
def test_state_under_recompute(keep: str) -> None:
    def strategy(s: piper.Schedule) -> None:
        parallel(pp=2, microbatches=2)(s)
        s.recompute(piper.where(), keep=keep)

    for change in (_added, _centred):
        program = piper.trace(lambda c=change: _Staged(c).double(), BATCH, _step)
        found = []
        for how in (strategy, parallel(pp=2, microbatches=2)):
            job = program.apply(how).lower(optimizer=piper.sgd(lr=0.1))
            with job.launch("loopback", adversary=True) as run:
                losses = [run.step(BATCH).loss for _ in range(3)]
                found.append((losses, run.buffers()["mean"]))
        torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_a_buffer_that_two_regions_change_is_refused() -> None:
    class Both(_Staged):
        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP"):
                x = self.a(x)
                self.mean.add_(x.detach().mean(0))
            with piper.annotate("PP"):
                y = self.b(x)
                self.mean.mul_(y.detach().mean())
            return y

    with pytest.raises(
        TraceError, match=r"mean is changed by what several regions make .*test_state"
    ):
        piper.trace(lambda: Both(_added).double(), BATCH, _step).apply(parallel(pp=2)).lower()


class _OwnSync(nn.SyncBatchNorm):
    pass


class SyncBatchNormFree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def _normed(norm: Callable[[], nn.Module]) -> piper.Program:
    make_model = lambda: nn.Sequential(nn.Linear(6, 6), norm()).double()  # noqa: E731
    return piper.trace(make_model, BATCH, _step).apply(parallel(dp=2))


def test_a_synced_norm_is_known_by_its_class_and_not_by_names() -> None:
    with pytest.raises(AxisError, match="SyncBatchNorm"):
        _normed(lambda: _OwnSync(6)).lower()
    assert "norm.running_mean" in str(_normed(SyncBatchNormFree).lower().plan.tensors)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    def longer(model: Any, y: Tensor) -> Tensor:
        model.mean = torch.cat([model.mean, y.detach().mean(0)])
        return y

    with pytest.raises(TraceError, match=r"of another shape or dtype \(.*test_state"):
        piper.trace(lambda: _Staged(longer).double(), BATCH, _step)


def test_verify_compares_buffers() -> None:
    def make() -> nn.Module:
        # A bias before a norm would have no gradient beyond rounding.
        layers = nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    program = piper.trace(make, BATCH, _step)
    job = program.apply(parallel(dp=2, microbatches=2)).lower(optimizer=piper.adamw(lr=1e-2))
    batches = [BATCH, BATCH + 1]
    reference = train_one_device(job, batches)
    assert "1.running_mean" in reference.parameters
    with job.launch("loopback") as run:
        assert compare(run, batches, reference).exact
        with pytest.MonkeyPatch.context() as patch:
            held = run.buffers
            patch.setattr(run, "buffers", lambda: {n: b + b / 10**6 for n, b in held().items()})
            errors = compare(run, [], Trained([], [], reference.parameters))
    assert errors.parameter > 1e-7 and "running" in errors.worst["parameter"]
