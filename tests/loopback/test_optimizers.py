"""Every torch.optim optimizer that a plan takes: as a factory, exact, and with the bytes it says."""

from __future__ import annotations

import inspect
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import where
from piper.api.program import Program
from piper.errors import PlanError
from piper.ir.tensor_type import dtype_bytes
from piper.plan.optimizers import KNOWN, WHOLE, Grouping, Optimizer
from piper.plan.types import ParamGroup
from piper.runtime.factory import resolve_optimizer
from piper.runtime.worker.update import Updater
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import CASES, batches_of, program_of

ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"lr": 1e-2}),
    ("Adam", {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"lr": 1e-2, "fused": True}),
    ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 0.5}),
    ("Adamax", {"lr": 1e-2}),
    ("RMSprop", {"lr": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    ("NAdam", {"lr": 1e-2}),
    ("RAdam", {"lr": 1e-2}),
    ("ASGD", {"lr": 1e-2}),
    ("Rprop", {"lr": 1e-3}),
]
MATRICES = [("Adafactor", {"lr": 1e-2}), ("Muon", {"lr": 1e-2})]
OURS = [*ELEMENTWISE, *((n, o) for n, o in MATRICES if hasattr(torch.optim, n))]


def _named(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *(key for key in case[1] if key != "lr")))


def _factory(name: str, options: dict[str, Any]) -> Any:
    return partial(getattr(torch.optim, name), **options)


def test_no_optimizer_of_torch_is_forgotten() -> None:
    found = {
        name
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer)
    }
    assert found - {"Optimizer", "LBFGS", "SparseAdam"} <= set(KNOWN)
    assert {name for name, _ in OURS} == found & set(KNOWN)


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE, ids=map(_named, ELEMENTWISE))
def test_elementwise_optimizers_train_like_one_device(name: str, options: dict[str, Any]) -> None:
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=2)
    job = program_of("tied").apply(strategy).lower(optimizer=_factory(name, options))
    assert [group.optimizer for group in job.plan.param_groups] == [name]
    with job.launch("loopback") as run:
        errors = compare(run, batches_of("tied"), train_one_device(job, batches_of("tied")))
    assert errors.exact, errors


class _Matrices(nn.Module):
    """Nothing but matrices, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for half in (self.layers[:2], self.layers[2:]):
            with piper.annotate("PP"):
                for layer in half:
                    x = torch.tanh(layer(x))
        return x


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _matrix_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in "xy")
    return {"x": x, "y": y}


@cache
def _matrix_program(dtype: torch.dtype) -> Program:
    batch = {key: leaf.to(dtype) for key, leaf in _matrix_batch(0).items()}
    return piper.trace(lambda: _Matrices().to(dtype), batch, _step)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_optimizers_of_whole_matrices_train_like_one_device(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    program = _matrix_program(torch.float64)
    job = program.apply(parallel(pp=2, dp=2, microbatches=2)).lower(
        optimizer=_factory(name, {"lr": 1e-2})
    )
    batches = [_matrix_batch(seed) for seed in range(3)]
    with job.launch("loopback") as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors


@pytest.mark.parametrize(("zero", "ep"), [(1, 1), (2, 1), (3, 1), (0, 2)])
def test_optimizers_of_whole_matrices_are_refused_where_a_directive_cuts(
    zero: int, ep: int
) -> None:
    def strategy(s: piper.Schedule) -> None:
        s.mesh(dp=2)
        if ep > 1:
            s.replicate(where(EP=None), over="dp")
            s.shard(where(EP="*"), over="dp")
        else:
            s.replicate(where(), over="dp", zero=zero)

    with pytest.raises(PlanError) as refused:
        program_of("moe").apply(strategy).lower(optimizer=torch.optim.Adafactor)
    text = str(refused.value)
    assert "Adafactor averages over rows, columns and all of a parameter" in text
    assert ("shard (" if ep > 1 else "replicate (") in text and "test_optimizers.py:" in text
    assert "legal: replicate with zero=0" in text


def _muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices of the stages by Muon; embedding, head, experts and vectors by AdamW in two groups."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("stages")]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in others if p.ndim > 1]},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=1e-2)]


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2, "ep": 2}])
def test_muon_on_matrices_with_adamw_on_the_rest(degrees: dict[str, int]) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    program = program_of("moe").apply(parallel(microbatches=2, **degrees))
    job = program.lower(optimizer=_muon_and_adamw)
    assert [(g.optimizer, g.number) for g in job.plan.param_groups] == [
        ("Muon", 0),
        ("AdamW", 1),
        ("AdamW", 1),
    ]
    assert "optimizer Muon, AdamW (2 groups)" in job.summary()
    reference = train_one_device(job, batches_of("moe"))
    with job.launch("loopback") as run:
        errors = compare(run, batches_of("moe"), reference)
        state = run.optimizer_state()
    assert errors.exact, errors
    assert state["stages.0.qkv.weight"].keys() == {"momentum_buffer"}
    assert "exp_avg_sq" in state["head.weight"]


def test_muon_is_refused_where_a_directive_cuts_its_matrices() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    program = program_of("moe").apply(parallel(dp=2, zero=1))
    with pytest.raises(PlanError, match=r"each rank steps only a part of stages.0.qkv.weight"):
        program.lower(optimizer=_muon_and_adamw)


def test_muon_refuses_what_is_no_matrix() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    with pytest.raises(PlanError, match=r"Muon steps matrices only, but .* is \[\d+\]"):
        program_of("dense").lower(optimizer=torch.optim.Muon)


class _Mine(torch.optim.SGD):
    pass


REFUSED = [
    (3, "optimizer is 3"),
    (lambda params: 3, "made a int"),
    (_Mine, "made a _Mine"),
    (torch.optim.LBFGS, "LBFGS is not supported: it computes the loss several times"),
    (torch.optim.SparseAdam, "SparseAdam is not supported: gradients are dense"),
    (Optimizer("Adamm"), "Adamm is not supported"),
    (partial(torch.optim.AdamW, betas=(2.0, 0.9)), "Invalid beta"),
    (partial(torch.optim.AdamW, momentum=0.9), "momentum"),
    (lambda params: torch.optim.SGD([torch.zeros(1)]), "holds tensors that are no parameters"),
    (
        lambda params: torch.optim.SGD(
            [{"params": params}, {"params": [torch.zeros(1)], "lr": 1.0}]
        ),
        "holds tensors that are no parameters",
    ),
    (lambda params: torch.optim.SGD([p for p in params if p.ndim > 2]), "failed: .* empty"),
    (lambda params: torch.optim.SGD(params[3:]), "leaves out all that is trained$"),
    (lambda params: [], "made no optimizer"),
    (lambda params: [torch.optim.SGD(params), 3], "made a int"),
    (
        lambda params: torch.optim.SGD([{"params": params}, {"params": params[1:2]}]),
        "failed: some parameters appear in more than one parameter group",
    ),
    (
        lambda params: [torch.optim.SGD(params), torch.optim.AdamW(params[2:])],
        "holds norm twice$",
    ),
    (
        lambda params: torch.optim.AdamW([{"params": params, "weight_decy": 0.0}]),
        "gives group 0 'weight_decy', which AdamW does not take .did you mean 'weight_decay'",
    ),
    (
        lambda params: torch.optim.AdamW([{"params": params, "decoupled_weight_decay": False}]),
        "gives group 0 'decoupled_weight_decay', which AdamW does not take",
    ),
    (lambda params: _unfrozen(params), "has frozen require a gradient, which is too late"),
    (piper.adamw(groups={"*.bias": {"lr": 0.1}}), r"no parameter matches '\*.bias'"),
    (piper.adamw(groups={"*": {}, "bias": {}}), "no parameter matches 'bias'"),
    (piper.adamw(groups={"bias": {"rl": 0.1}}), "gives group 0 'rl', which AdamW does not take"),
    (piper.adamw(groups={"bias": {}}, rl=0.1), "AdamW does not take .*'rl'"),
    (lambda params: _with_hook(params), "adds hooks to the optimizer's step"),
    (lambda params: _with_scheduler(params), "replaces the optimizer's step"),
]


def _with_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params)
    optimizer.register_step_pre_hook(lambda *args: None)
    return optimizer


def _with_scheduler(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


def _unfrozen(params: Any) -> torch.optim.Optimizer:
    params[3].requires_grad_(True)
    return torch.optim.SGD(params)


class _Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.bias = nn.Parameter(torch.zeros(2))
        self.norm = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)


FEW = _Few()


def _resolve(given: Any) -> Grouping:
    params = dict(FEW.named_parameters())
    return resolve_optimizer(given, FEW, params, trained=("weight", "bias", "norm"))


def _group(given: Any) -> ParamGroup:
    """The one group with all that is trained."""
    grouping = _resolve(given)
    assert grouping.of == {"weight": 0, "bias": 0, "norm": 0}
    (group,) = grouping.groups
    return group


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_optimizers_that_are_refused(given: Any, why: str) -> None:
    with pytest.raises(PlanError) as refused:
        _resolve(given)
    assert re.search(why, refused.value.message), refused.value.message
    assert refused.value.legal
    if "factory" in refused.value.message and inspect.isfunction(given):
        line = inspect.getsourcelines(given)[1]
        assert f"test_optimizers.py:{line})" in refused.value.message


def test_a_factory_becomes_what_it_was_given() -> None:
    found = _group(partial(torch.optim.AdamW, lr=torch.tensor(0.5), betas=(0.8, 0.999)))
    assert found == ParamGroup("AdamW", {"lr": 0.5, "betas": (0.8, 0.999)})
    assert _group(torch.optim.SGD) == ParamGroup("SGD", {})
    assert _group(piper.sgd(lr=0.2)) == ParamGroup("SGD", {"lr": 0.2})
    assert _group(lambda params: torch.optim.SGD(params, 0.2)) == ParamGroup("SGD", {"lr": 0.2})
    assert _group(lambda params: torch.optim.SGD(iter(params), 0.2)) == _group(piper.sgd(lr=0.2))


def _grouped(params: Any) -> torch.optim.Optimizer:
    """The idiom of most GPT scripts."""
    params = [p for p in params if p.requires_grad]
    matrices = [p for p in params if p.dim() >= 2]
    others = [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.5)


def _by_name(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    decayed = {"params": [named["weight"]], "weight_decay": 0.1}
    rest = {"params": [named["bias"], named["norm"]], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, rest], lr=0.5)


def _annotated(whole: _Few) -> torch.optim.Optimizer:
    return _by_name(whole)


def test_groups_are_what_a_factory_says() -> None:
    groups = (
        ParamGroup("AdamW", {"lr": 0.5, "weight_decay": 0.1}),
        ParamGroup("AdamW", {"lr": 0.5, "weight_decay": 0.0}),
    )
    wanted = Grouping(groups, {"weight": 0, "bias": 1, "norm": 1})
    for factory in (_grouped, _by_name, _annotated, partial(_by_name)):
        assert _resolve(factory) == wanted


def test_groups_by_patterns() -> None:
    groups = {"b*": {"lr": 0.1}, "*o*": {"weight_decay": 0.0}}
    found = _resolve(piper.sgd(lr=0.5, groups=groups))
    assert found.of == {"weight": 2, "bias": 0, "norm": 1}
    assert found.groups == (
        ParamGroup("SGD", {"lr": 0.1}, label="b*"),
        ParamGroup("SGD", {"lr": 0.5}, label="*o*"),
        ParamGroup("SGD", {"lr": 0.5}),
    )


@pytest.mark.filterwarnings("ignore:.*leaves out")
@pytest.mark.parametrize("name", ["left out", "frozen", "frozen in a group"])
def test_what_a_factory_leaves_out_or_freezes_is_in_no_group(name: str) -> None:
    def factory(model: nn.Module) -> torch.optim.Optimizer:
        bias = model.get_parameter("bias")
        if "frozen" in name:
            bias.requires_grad_(False)
        whole = name == "frozen in a group"
        return torch.optim.SGD([p for p in model.parameters() if whole or p is not bias])

    assert _resolve(factory).of == {"weight": 0, "norm": 0}
    assert FEW.bias.requires_grad, "the model is as before"


def test_several_optimizers_have_groups_of_their_own() -> None:
    def factory(params: list[Tensor]) -> tuple[torch.optim.Optimizer, ...]:
        rest = [{"params": params[1:2]}, {"params": params[2:], "lr": 1.0, "name": "norms"}]
        return torch.optim.SGD(params[:1]), torch.optim.AdamW(rest)

    found = _resolve(factory)
    assert found.of == {"weight": 0, "bias": 1, "norm": 2}
    assert found.groups == (
        ParamGroup("SGD"),
        ParamGroup("AdamW", number=1),
        ParamGroup("AdamW", {"lr": 1.0}, number=1, label="norms"),
    )


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_a_factory_sees_what_the_model_wrote_on_a_parameter() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(6, 6)
        layer.bias.no_decay = True
        return layer.double()

    def factory(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if not hasattr(p, "no_decay")], lr=0.1)

    program = piper.trace(make, torch.ones(8, 6).double(), lambda m, x: m(x).square().mean())
    plan = program.lower(optimizer=factory).plan
    assert {n: t.trainable for n, t in plan.tensors.items()} == {"weight": True, "bias": False}


def test_a_factory_is_shown_the_models_parameters() -> None:
    program = program_of("tied")
    shown: list[tuple[int, ...]] = []

    def factory(params: list[Tensor]) -> torch.optim.Optimizer:
        shown.extend(tuple(p.shape) for p in params)
        return torch.optim.Adagrad(params, lr=0.1)

    program.lower(optimizer=factory)
    assert shown == [tuple(p.shape) for p in CASES["tied"].model().parameters()]


@pytest.mark.parametrize(("name", "options"), OURS, ids=map(_named, OURS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_the_bytes_of_optimizer_state(
    name: str, options: dict[str, Any], dtype: str
) -> None:
    """Per rank: what the plan says beside the unique storages that torch made."""
    wide = getattr(torch, dtype)
    batch = {key: leaf.to(wide) for key, leaf in _matrix_batch(0).items()}
    program = _matrix_program(wide)
    zero = 0 if name in WHOLE else 1
    job = program.apply(parallel(pp=2, dp=2, zero=zero)).lower(optimizer=_factory(name, options))
    with job.launch("loopback") as run:
        run.step(batch)
        run.step(batch)
        measured = {_state_bytes(w.updaters.values()) for w in run.workers.workers}
    said = {peak.by_category["optimizer"] for peak in job.report.peaks}
    assert measured == said and (dtype_bytes(dtype) == 4 or min(said) > 0)


def _state_bytes(updaters: Any) -> int:
    storages = {}
    for updater in updaters:
        assert isinstance(updater, Updater)
        optimizers = updater.optimizers.values()
        held = [v for o in optimizers for s in o.state.values() for v in s.values()]
        if updater.narrow:
            held += updater.masters
        storages |= {t.untyped_storage().data_ptr(): t for t in held if isinstance(t, Tensor)}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def test_a_factory_that_leaves_parameters_out_is_told() -> None:
    """With the line of the factory, and the line of lower; what it freezes it does not forget."""
    program = program_of("dense")
    half = lambda params: torch.optim.SGD(params[:3], lr=0.1)  # noqa: E731
    with pytest.warns(
        UserWarning, match=r"factory \(.*test_optimizers.py:\d+\) leaves out .* more"
    ) as told:
        program.lower(optimizer=half)
    assert [Path(each.filename).name for each in told] == ["test_optimizers.py"]

    def frozen(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        for param in params[3:]:
            param.requires_grad_(False)
        return torch.optim.SGD(params[:3], lr=0.1)

    program.lower(optimizer=frozen)
