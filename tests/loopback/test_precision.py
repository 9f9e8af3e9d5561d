"""bfloat16 compute with float32 masters, beside the same written in plain torch on one device."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.errors import PlanError, RunError
from piper.runtime.worker.weights import initial_value
from piper.strategies import parallel
from tests.float32_mode import Float32Mode
from tests.zoo import CASES

STEPS = 20


class Rows(nn.Module):
    """A batch of real numbers, a float32 buffer, norms, and a parameter that two stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for start in (0, 2):
            with piper.annotate("PP"):
                for layer, norm in zip(
                    self.layers[start : start + 2], self.norms[start : start + 2], strict=True
                ):
                    x = x + torch.tanh(layer(norm(x)))
                x = x * self.scale.to(x.dtype)
        return x


def _rows_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _rows_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 8, generator=generator)
    return {"x": x, "y": x.roll(1, 1)}


@cache
def _program(name: str) -> Program:
    if name == "rows":
        return piper.trace(Rows, _rows_batch(0), _rows_step)
    return piper.trace(CASES[name].make_model, CASES[name].batch(0), CASES[name].step)


def _batches(name: str) -> list[Any]:
    return [_rows_batch(s) if name == "rows" else CASES[name].batch(s % 3) for s in range(STEPS)]


def _job(name: str, **options: Any) -> Job:
    strategy = parallel(microbatches=2, **options)
    return _program(name).apply(strategy).lower(optimizer=piper.adamw(lr=1e-2), precision="bf16")


def _initial(job: Job) -> dict[str, Tensor]:
    """Initial values as the user's model has them."""
    plan = job.plan
    return {n: initial_value(t, job.bodies, seed=plan.seed) for n, t in plan.tensors.items()}


def _reference(job: Job, name: str, *, over_ranks_first: bool) -> tuple[list[float], Any]:
    """Plain torch on one device: bf16 copies of float32 masters for each step, losses and norms in
    float32, gradients of the global microbatches summed in float32, and AdamW on the masters.

    Additions have the order of the plan: microbatches of a data rank and then ranks, or the other
    way round where each microbatch is reduced at once.
    """
    plan, source = job.plan, job.source
    model = source.make_model()
    model.requires_grad_(False)
    initial = _initial(job)
    masters = {n: nn.Parameter(initial[n].float()) for n, _ in model.named_parameters()}
    buffers = {n: initial[n] for n, _ in model.named_buffers()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    ranks, num = plan.num_data_ranks, plan.num_microbatches
    losses = []
    for batch in _batches(name):
        found = {}
        for rank in range(ranks):
            for micro in range(num):
                piece = rank * num + micro
                params = {n: m.detach().bfloat16().requires_grad_() for n, m in masters.items()}
                rows = {k: _cast(leaf).chunk(ranks * num)[piece] for k, leaf in batch.items()}
                with torch.enable_grad(), Float32Mode():
                    loss = _called(model, params | buffers, source.step, rows)
                grads = torch.autograd.grad(loss, list(params.values()))
                found[rank, micro] = [g.float() for g in grads], loss.detach().float()
        pairs = [(r, m) for r in range(ranks) for m in range(num)]
        if over_ranks_first:
            per = [_sum([found[r, m][0] for r in range(ranks)]) for m in range(num)]
        else:
            per = [_sum([found[r, m][0] for m in range(num)]) for r in range(ranks)]
        for master, grad in zip(masters.values(), _sum(per), strict=True):
            master.grad = grad / float(ranks * num)
        per_rank = [sum(found[r, m][1] for m in range(num)) for r in range(ranks)]
        losses.append(float(sum(per_rank)) / len(pairs))
        optimizer.step()
    return losses, {n: m.detach() for n, m in masters.items()}


def _called(model: nn.Module, tensors: dict[str, Tensor], step: Any, rows: Any) -> Tensor:
    whole = _Step(model, step)
    return functional_call(whole, {f"model.{n}": t for n, t in tensors.items()}, (rows,))


class _Step(nn.Module):
    def __init__(self, model: nn.Module, step: Any) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self, rows: Any) -> Any:
        return self.step(self.model, rows)


def _cast(leaf: Tensor) -> Tensor:
    return leaf.bfloat16() if leaf.is_floating_point() else leaf


def _sum(parts: list[list[Tensor]]) -> list[Tensor]:
    total = [part.clone() for part in parts[0]]
    for more in parts[1:]:
        for mine, other in zip(total, more, strict=True):
            mine += other
    return total


PLANS = [
    {"pp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb_h1"},
    {"pp": 2, "dp": 2, "zero": 3},
]


def _named(options: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in options.items())


CASES_OF = [*(("dense", options) for options in PLANS), ("moe", PLANS[1]), ("moe", PLANS[4])]


@pytest.mark.parametrize(
    ("name", "options"), CASES_OF, ids=lambda c: c if c == str(c) else _named(c)
)
def test_training_is_bit_equal_to_one_device(name: str, options: dict[str, Any]) -> None:
    """Every addition has the same order, so that losses and masters agree in every bit."""
    job = _job(name, **options)
    first = options.get("zero", 0) >= 2
    losses, masters = _reference(job, name, over_ranks_first=first)
    with job.launch("loopback") as run:
        found = [run.step(batch).loss for batch in _batches(name)]
        mine, narrow = run.masters(), run.parameters()
    assert found == losses
    assert mine.keys() == masters.keys()
    for key, master in mine.items():
        assert master.dtype == torch.float32 and torch.equal(master, masters[key]), key
        assert torch.equal(narrow[key], master.bfloat16()), key
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("zero", range(4))
def test_experts_on_several_ranks_follow_one_device(zero: int) -> None:
    """An expert's gradient is one product over the rows of all ranks, where one device adds two that
    are rounded to 8 bits."""
    job = _job("moe", pp=2, dp=2, ep=2, zero=zero)
    losses, masters = _reference(job, "moe", over_ranks_first=zero >= 2)
    with job.launch("loopback") as run:
        found = [run.step(batch).loss for batch in _batches("moe")]
        mine = run.masters()
    assert mine.keys() == masters.keys()
    assert found == pytest.approx(losses, rel=0, abs=2**-7)
    assert found[0] == losses[0]


@pytest.mark.parametrize("options", PLANS, ids=_named)
def test_masters_start_from_the_models_own_values(options: dict[str, Any]) -> None:
    job = _job("rows", **options)
    initial = _initial(job)
    with job.launch("loopback") as run:
        masters, parameters = run.masters(), run.parameters()
        held = run.workers.tensors("buffer")
    assert masters.keys() == parameters.keys() == initial.keys() - {"scale"}
    for name, master in masters.items():
        assert initial[name].dtype == torch.float32
        assert torch.equal(master, initial[name]), name
        assert torch.equal(parameters[name], initial[name].bfloat16()), name
    weight = initial["layers.0.weight"]
    assert not torch.equal(weight, weight.bfloat16().float()), "the values are round: no test"
    buffers = [t["scale"] for t in held if "scale" in t]
    assert buffers and all(torch.equal(b, initial["scale"]) for b in buffers)
    assert job.plan.tensors["scale"].dtype == "float32"


@pytest.mark.parametrize("options", PLANS[1::2], ids=_named)
def test_batches_of_real_numbers_are_cast(options: dict[str, Any]) -> None:
    """float32 batches go in as they are; the tied parameter's two uses are added in float32."""
    job = _job("rows", **options)
    assert {leaf.dtype for leaf in job.plan.batch.values()} == {"bfloat16"}
    with job.launch("loopback") as run:
        found = [run.step(batch).loss for batch in _batches("rows")]
        grads = run.gradients()
    with job.launch("loopback", adversary=True, seed=3) as run:
        cast = [{k: v.bfloat16() for k, v in b.items()} for b in _batches("rows")]
        assert [run.step(batch).loss for batch in cast] == found
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert found[-1] < 0.5 * found[0]


def test_integers_are_not_cast() -> None:
    job = _job("rows")
    batch = _rows_batch(0)
    with job.launch("single") as run, pytest.raises(RunError, match="int64"):
        run.step({**batch, "x": batch["x"].long()})


def test_precisions() -> None:
    with pytest.raises(PlanError, match="precision='fp8'") as refused:
        _program("rows").lower(precision="fp8")
    assert refused.value.legal and "bf16" in refused.value.legal
    plain = _program("rows").lower()
    assert _program("rows").lower(precision="fp32").plan == plain.plan
    assert {leaf.dtype for leaf in plain.plan.batch.values()} == {"float32"}


def test_stages_that_were_cut_are_cut_there_in_bfloat16_too() -> None:
    program = piper.trace(CASES["untagged"].make_model, CASES["untagged"].batch(0), _untagged_step)
    strategy = parallel(pp=4, microbatches=4)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-2), precision="bf16")
    held = [
        {s.source for s in c.slots if s.kind == "param"}
        for c in program.apply(strategy).lower().plan.classes
    ]
    assert [{s.source for s in c.slots if s.kind == "param"} for c in job.plan.classes] == held
    with job.launch("loopback") as run:
        assert run.step(CASES["untagged"].batch(0)).loss > 0


def _untagged_step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return CASES["untagged"].step(model, batch)


class Normed(nn.Module):
    """Running values stay float32 where the norm's parameters are bfloat16."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        norms: dict[str, Any] = {
            "batch": nn.BatchNorm1d,
            "instance": partial(nn.InstanceNorm1d, affine=True, track_running_stats=True),
        }
        self.norm = norms[kind](4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).view(len(x), 4, 2))


def _mixed(kind: str, state: dict[str, Tensor]) -> Normed:
    """With the values of bfloat16: the layer is in it, the norm's parameters are float32."""
    model = Normed(kind)
    model.load_state_dict(state)
    model.layer.bfloat16()
    for param in model.norm.parameters():
        param.data = param.data.bfloat16().float()
    return model


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_norms_with_running_values(kind: str) -> None:
    """As torch's norms of bfloat16 with parameters and running values in float32, the only ones that it
    has on a CPU."""
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    program = piper.trace(lambda: Normed(kind), batch, lambda m, b: m(b).float().square().mean())
    job = program.lower(precision="bf16", optimizer=piper.sgd(lr=0.1))
    with job.launch("loopback") as run:
        model = _mixed(kind, run.state_dict())
        wanted = model(batch.bfloat16()).float().square().mean()
        wanted.backward()
        begun = run.masters()
        assert run.step(batch).loss == pytest.approx(wanted.item(), rel=1e-6)
        torch.testing.assert_close(run.buffers(), dict(model.named_buffers()))
        for name, master in run.masters().items():
            grad = model.get_parameter(name).grad.bfloat16().float()
            torch.testing.assert_close(master, begun[name] - 0.1 * grad)
        model = _mixed(kind, run.state_dict()).eval()
        wanted = model(batch.bfloat16()).float().square().mean()
        assert run.evaluate(batch).loss == pytest.approx(wanted.item(), rel=1e-6)


def test_norms_in_stages_that_were_cut() -> None:
    """Parameters of norms are cast in bfloat16 alone; the stages are those of float32."""

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))

    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    program = piper.trace(make_model, batch, lambda m, b: m(b).float().pow(4).mean())
    found = []
    for pp in (1, 2):
        job = program.apply(parallel(pp=pp, microbatches=2)).lower(
            precision="bf16", optimizer=piper.sgd(lr=0.1)
        )
        with job.launch("loopback") as run:
            losses = [run.step(batch).loss for _ in range(2)]
            found.append((losses, run.evaluate(batch).loss, run.buffers(), run.masters()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
