"""Parameter groups under every way to keep parameters: exact beside the user's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

import piper
from piper.api.job import Job
from piper.compiler import source
from piper.errors import PlanError
from piper.plan.optimizers import Grouping
from piper.plan.types import ParamGroup
from piper.runtime.factory import at_rate
from piper.runtime.worker import handlers
from piper.runtime.worker.update import Piece, Updater
from piper.strategies import parallel
from piper.training.lr import LearningRate
from piper.training.verify import Errors, Trained, compare, load_initial, train_one_device
from tests.loopback.plain_loop import PlainLoop
from tests.zoo import CASES, batches_of, program_of

CASE = "tied"  # with experts


def by_module(model: nn.Module) -> torch.optim.Optimizer:
    """No decay on norms and biases, small steps of the embedding, large ones of the experts."""
    small = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    small |= {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    special = {"embed.weight": 1e-3}
    special |= {name: 3e-2 for name, _ in model.named_parameters() if ".experts." in name}
    named = dict(model.named_parameters())
    rest = [p for n, p in named.items() if id(p) not in small and n not in special]
    groups: list[dict[str, Any]] = [
        {"params": rest, "weight_decay": 0.3},
        {"params": [p for p in named.values() if id(p) in small], "weight_decay": 0.0},
    ]
    for lr in sorted(set(special.values())):
        groups.append({"params": [named[n] for n, r in special.items() if r == lr], "lr": lr})
    return torch.optim.AdamW(groups, lr=1e-2)


def by_shape(params: list[Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5, "betas": (0.5, 0.9)},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=2e-2)


PATTERNS = piper.sgd(
    lr=0.1,
    momentum=0.9,
    groups={"*.bias": {"momentum": 0.0}, "stages.0.*": {"lr": 0.01}, "*norm*": {"lr": 0.3}},
)


def two_kinds(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.Adam(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def flags(model: nn.Module) -> torch.optim.Optimizer:
    """Groups that torch steps with kernels of their own."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    fused = {"params": matrices, "fused": True, "foreach": False}
    return torch.optim.AdamW([fused, {"params": others, "foreach": True}], lr=1e-2)


FACTORIES: dict[str, Any] = {
    "module": by_module,
    "shape": by_shape,
    "patterns": PATTERNS,
    "two kinds": two_kinds,
    "flags": flags,
}
DEGREES: dict[str, dict[str, Any]] = {
    "zero 0": {"dp": 2, "zero": 0},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2, "schedule": "zb_h1"},
    "ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 1},
    "buckets": {"pp": 2, "dp": 2, "zero": 3, "bucket_size": "1KiB"},
    "small buckets": {"dp": 4, "zero": 1, "bucket_size": 600},
}


def _job(optimizer: Any, degrees: dict[str, Any], **lowered: Any) -> Job:
    pieces = 8 // degrees.get("dp", 1)
    program = program_of(CASE).apply(parallel(microbatches=pieces, **degrees))
    return program.lower(optimizer=optimizer, **lowered)


@cache
def _reference(name: str) -> Trained:
    """One device's training, which is the same under all strategies with 8 global microbatches."""
    return train_one_device(_job(FACTORIES[name], {}), batches_of(CASE))


def _errors(job: Job, reference: Trained) -> Errors:
    with job.launch("loopback", adversary=True) as run:
        return compare(run, batches_of(CASE), reference)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", FACTORIES)
def test_groups_train_like_one_device(name: str, degrees: str) -> None:
    job = _job(FACTORIES[name], DEGREES[degrees])
    assert len(job.plan.param_groups) > 1
    errors = _errors(job, _reference(name))
    assert errors.exact, errors


def test_parts_of_a_bucket_hold_several_groups() -> None:
    """Else the tests above would not see a group that ends in the middle of a rank's part."""
    plan = _job(by_module, DEGREES["zero 3"]).plan
    mixed = [bucket for bucket in plan.buckets if len(set(bucket.param_groups)) > 1]
    assert mixed and all(list(b.param_groups) == sorted(b.param_groups) for b in mixed)


def _ignore_groups(patch: pytest.MonkeyPatch) -> None:
    real = source.resolve_optimizer

    def resolve(*args: Any, **more: Any) -> Grouping:
        found = real(*args, **more)
        return Grouping(found.groups, dict.fromkeys(found.of, 0))

    patch.setattr(source, "resolve_optimizer", resolve)


def _swap_two(patch: pytest.MonkeyPatch) -> None:
    real = source.resolve_optimizer

    def resolve(*args: Any, **more: Any) -> Grouping:
        found = real(*args, **more)
        of = {**found.of, "stages.1.mlp.bias": found.of["stages.1.mlp.weight"]}
        return Grouping(found.groups, of)

    patch.setattr(source, "resolve_optimizer", resolve)


def _runs_moved_by_one(patch: pytest.MonkeyPatch) -> None:
    """The runs of a part, each with the first element of the next."""
    real = handlers.runs_within

    def moved(*args: Any) -> list[Any]:
        runs = real(*args)
        first = [runs[0].begin, *(run.begin + 1 for run in runs[1:])]
        last = [*(run.end + 1 for run in runs[:-1]), runs[-1].end]
        pairs = zip(runs, first, last, strict=True)
        return [run._replace(begin=begin, end=end) for run, begin, end in pairs]

    patch.setattr(handlers, "runs_within", moved)


MUTANTS = [
    (_ignore_groups, "zero 0"),
    (_ignore_groups, "zero 3"),
    (_ignore_groups, "ep2"),
    (_swap_two, "zero 0"),
    (_swap_two, "buckets"),
    (_runs_moved_by_one, "zero 3"),
    (_runs_moved_by_one, "ep2"),
]


@pytest.mark.parametrize("name", ["module", "two kinds"])
@pytest.mark.parametrize(("mutate", "degrees"), MUTANTS)
def test_groups_that_are_ignored_are_seen(
    mutate: Callable[[pytest.MonkeyPatch], None],
    name: str,
    degrees: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = _reference(name)
    mutate(monkeypatch)
    errors = _errors(_job(FACTORIES[name], DEGREES[degrees]), reference)
    assert not errors.exact and errors.parameter > 1e-6, errors


LOWERED: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.05},
    "late clip": {"clip": 0.05, "late_clip": True},
}


@pytest.mark.parametrize("how", LOWERED)
@pytest.mark.parametrize("degrees", ["zero 0", "buckets"])
def test_groups_under_clipping(how: str, degrees: str) -> None:
    job = _job(by_module, DEGREES[degrees], **LOWERED[how])
    errors = _errors(job, train_one_device(job, batches_of(CASE)))
    assert errors.exact, errors


def _left_out(model: nn.Module) -> torch.optim.Optimizer:
    """The first stage and what has one dim is not trained."""
    named = model.named_parameters()
    params = [p for name, p in named if p.ndim > 1 and not name.startswith("stages.0")]
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*leaves out")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("degrees", ["zero 0", "zero 3", "ep2", "buckets"])
def test_what_is_left_out_is_not_trained(degrees: str, clip: float | None) -> None:
    job = _job(_left_out, DEGREES[degrees], clip=clip)
    reference = train_one_device(job, batches_of(CASE))
    model = CASES[CASE].model()
    load_initial(model, job)
    with job.launch("loopback") as run:
        errors = compare(run, batches_of(CASE), reference)
        after, state, gradients = run.parameters(), run.optimizer_state(), run.gradients()
        evaluated = run.evaluate(batches_of(CASE)[0]).loss
    assert errors.exact, errors
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, after[n])}
    (group,) = _left_out(model).param_groups
    wanted = {n for n, p in model.named_parameters() if any(p is q for q in group["params"])}
    assert moved == wanted == state.keys() == gradients.keys()
    model.load_state_dict(after, strict=False)
    model.eval()
    loss = CASES[CASE].step(model, batches_of(CASE)[0])
    assert evaluated == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*leaves out")
@pytest.mark.parametrize("case", ["untagged", "dropout", "counted"])
def test_what_is_left_out_of_other_models(case: str) -> None:
    """Stages that the compiler has cut, random numbers and a counted loss in the second trace."""
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=4)
    job = program_of(case).apply(strategy).lower(optimizer=_left_out, clip=0.1)
    assert not job.plan.tensors["stages.0.mlp.weight"].trainable
    reference = train_one_device(job, batches_of(case))
    with job.launch("loopback") as run:
        errors = compare(run, batches_of(case), reference)
    assert errors.exact, errors


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_a_gradient_that_nobody_steps_is_not_computed() -> None:
    few, all_ = _job(_left_out, DEGREES["zero 3"]), _job(piper.adamw(), DEGREES["zero 3"])
    assert few.report.peaks[0].kept["gradients"] < all_.report.peaks[0].kept["gradients"] / 2
    assert few.plan.flops == all_.plan.flops


@pytest.mark.parametrize("degrees", ["zero 0", "zero 3", "ep2"])
def test_optimizer_state_under_groups(degrees: str) -> None:
    """Whole, by torch's names, and other numbers of steps or pieces per group do not mix."""
    job = _job(two_kinds, DEGREES[degrees])
    plain = PlainLoop(job, CASES[CASE])
    plain.train(batches_of(CASE)[:2])
    with job.launch("loopback") as run:
        for batch in batches_of(CASE)[:2]:
            run.step(batch)
        found = run.optimizer_state()
    states = {p: state for o in plain.optimizers for p, state in o.state.items()}
    for name, param in plain.model.named_parameters():
        assert found[name].keys() == states[param].keys()
        for key, value in states[param].items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_plan_counts_the_bytes_of_groups(dtype: str | None) -> None:
    """Groups that keep more than others: the plan says the most that a rank may have."""
    job = _job(two_kinds, {"dp": 2, "zero": 1, "bucket_size": 600}, precision=dtype)
    with job.launch("loopback") as run:
        run.step(batches_of(CASE)[0])
        held = [memory["optimizer"] for memory in run.memory()]
    (peak,) = job.report.peaks
    steps = 8 * len(job.plan.buckets) * 4  # numbers of steps, which are no tensors of the device
    assert max(held) <= peak.kept["optimizer"] <= max(held) + steps


def _warmups(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
    """Each group has a schedule of its own."""
    groups = optimizer.param_groups
    return lrs.LambdaLR(
        optimizer, [lambda step, i=i: (step + 1) / (i + 2) for i in range(len(groups))]
    )


@pytest.mark.parametrize("name", ["module", "two kinds"])
def test_schedules_of_groups(name: str) -> None:
    job = _job(FACTORIES[name], DEGREES["zero 3"])
    plain = PlainLoop(job, CASES[CASE])
    first = plain.optimizers[0].param_groups[0]
    schedulers = [_warmups(optimizer) for optimizer in plain.optimizers]
    rates = [first["lr"]]

    def advance() -> None:
        for scheduler in schedulers:
            scheduler.step()
        rates.append(first["lr"])

    plain.train(batches_of(CASE), after=advance)
    with job.launch("loopback") as run:
        training = piper.train(run, batches_of(CASE), steps=3, lr_schedule=_warmups, log="none")
        after = run.parameters()
    assert [record.lr for record in training.records] == rates[:3], "of the first group"
    for key, param in plain.model.named_parameters():
        torch.testing.assert_close(after[key], param.detach(), rtol=1e-8, atol=1e-10)


def test_a_schedule_knows_the_names_of_groups() -> None:
    plan = _job(PATTERNS, {}).plan
    seen: list[Any] = []

    def schedule(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
        seen.extend(group.get("name") for group in optimizer.param_groups)
        return lrs.LambdaLR(optimizer, lambda step: 1.0)

    rate = LearningRate(plan.param_groups, schedule)
    assert seen == ["*.bias", "stages.0.*", "*norm*", None]
    assert [options["lr"] for options in rate.options] == [0.1, 0.01, 0.3, 0.1]


def test_options_of_each_group() -> None:
    job = _job(by_shape, DEGREES["zero 3"])
    batch = batches_of(CASE)[0]
    with job.launch("loopback") as run:
        before = run.parameters()
        run.set_options([{"lr": 0.0}, {}])
        run.step(batch)
        after = run.parameters()
        with pytest.raises(piper.errors.RunError, match="options of 1 parameter groups"):
            run.set_options([{}])
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (value.ndim >= 2), name


def test_a_saved_plan_keeps_its_groups(tmp_path: Path) -> None:
    job = _job(by_module, DEGREES["buckets"])
    job.save(tmp_path / "plan.json")
    loaded = piper.load_job(tmp_path / "plan.json")
    assert loaded.plan == job.plan
    with loaded.launch("loopback") as run:
        errors = compare(run, batches_of(CASE), _reference("module"))
        evaluated = run.evaluate(batches_of(CASE)[0]).loss
    assert errors.exact, errors
    with job.launch("loopback") as run:
        for batch in batches_of(CASE):
            run.step(batch)
        assert run.evaluate(batches_of(CASE)[0]).loss == evaluated


def test_one_rate_for_groups_of_several() -> None:
    plan = _job(at_rate(two_kinds_alike, 0.25), {}).plan
    assert [group.options["lr"] for group in plan.param_groups] == [0.25, 0.25]
    with pytest.raises(PlanError, match=r"one lr for groups that have 0.001, 0.01, 0.03"):
        _job(at_rate(by_module, 0.25), {})


def two_kinds_alike(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "momentum": 0.5}], 0.1)


def test_pieces_are_found_by_element() -> None:
    groups = [ParamGroup("SGD", {"momentum": 0.9}), ParamGroup("Adam")]
    pieces = [Piece(0, 0, 0, 3), Piece(1, 0, 3, 5)]
    updater = Updater(groups, [torch.ones(5)], [None], pieces)
    with torch.no_grad():
        updater.step(updater.grads_of([torch.ones(5)]), 1.0)
    assert updater.state_at(0, 2)[0].keys() == {"momentum_buffer"}
    state, begin = updater.state_at(0, 4)
    assert state["exp_avg"].shape == (2,) and begin == 3
