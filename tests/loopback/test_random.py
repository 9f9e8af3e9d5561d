"""Random operations: the same numbers under every strategy, new ones in every step and microbatch."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.bodies.files.codec import decode
from piper.bodies.operators import draws_random
from piper.bodies.random.uniform import keyed_uniform
from piper.cli.main import main
from piper.directives.schedule import Schedule
from piper.errors import RunError, ShardError, TraceError
from piper.plan.keys import key_of
from piper.strategies import parallel
from piper.training.verify import Errors, compare, train_one_device
from tests.loopback.programs import GM, Sharded, Two, check, mean_square, random_batch, two
from tests.strategies import strategy_of
from tests.zoo import ADAMW, program_of

PIECES, SIZE, P = 4, 2000, 0.3


class Masks(nn.Module):
    """Row i of a weight is dropped out in microbatch i alone: its gradient shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.ones(PIECES, SIZE)) for _ in range(2))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = F.dropout(self.one[row], P)
        with piper.annotate("PP"):
            return x + F.dropout(self.two[row], P)


def masks_job(strategy: Callable[[Schedule], None], **options: Any) -> Job:
    program = piper.trace(Masks, torch.arange(PIECES), lambda model, row: model(row).sum())
    with pytest.warns(UserWarning, match="step returns a sum over the batch"):
        return program.apply(strategy).lower(**options)


def masks(job: Job, *, steps: int = 2, adversary: bool = False) -> torch.Tensor:
    """What was kept: [step, operation, microbatch, element]."""
    found = []
    with job.launch("loopback", adversary=adversary) as run:
        for _ in range(steps):
            run.step(torch.arange(PIECES))
            grads = run.gradients()
            found.append(torch.stack([grads["one"], grads["two"]]))
    kept = torch.stack(found)
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / (1 - P) / PIECES))
    return kept > 0


def test_masks_differ_between_steps_operations_and_microbatches() -> None:
    found = masks(masks_job(lambda s: s.split(where(), "MB", PIECES)))
    for step, operation, microbatch in itertools.product(range(2), range(2), range(PIECES)):
        key = key_of(0, step=step, index=operation, microbatch=microbatch)
        numbers = keyed_uniform(torch.tensor([key]), 0, 0, [SIZE], torch.float32)
        assert torch.equal(found[step, operation, microbatch], numbers < 1 - P)
    every = found.flatten(0, 2)
    for i, one in enumerate(every):
        assert abs(float(one.double().mean()) - (1 - P)) < 0.06
        for other in every[:i]:
            agree = float((one == other).double().mean())
            assert abs(agree - ((1 - P) ** 2 + P**2)) < 0.07, "masks are independent"


def test_masks_are_the_same_under_every_strategy_and_another_seed_changes_them() -> None:
    wanted = masks(masks_job(lambda s: s.split(where(), "MB", PIECES)))
    for strategy in (
        parallel(dp=2, microbatches=2),
        parallel(dp=4, microbatches=1),
        parallel(pp=2, microbatches=4),
        parallel(pp=2, dp=2, microbatches=2),
    ):
        assert torch.equal(masks(masks_job(strategy), adversary=True), wanted)
    other = masks(masks_job(parallel(dp=2, microbatches=2), seed=1))
    assert 0.5 < float((other == wanted).double().mean()) < 0.65


def test_slots_name_the_operations_and_microbatches() -> None:
    job = program_of("dropout").apply(strategy_of("pp2", "1f1b")).lower(optimizer=ADAMW)
    keys = [slot for found in job.plan.classes for slot in found.slots if slot.kind == "key"]
    wanted = {(ops, mb) for ops in ("0-1", "2", "3-4", "5") for mb in range(8)}
    assert {(slot.source, slot.microbatch) for slot in keys} == wanted
    assert len(keys) == len(wanted)


def test_equal_stages_with_dropout_have_one_body() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with piper.annotate("PP"):
                    x = F.dropout(torch.tanh(F.dropout(layer(x))))
            return x

    program = piper.trace(Stages, random_batch(0).float(), lambda m, x: m(x).square().mean())
    job = program.apply(parallel(pp=2, microbatches=2)).lower()
    bodies = {t.name: t.body for found in job.plan.classes for t in found.tasks if t.kind == "run"}
    middle = [[bodies[f"{phase}[PP={i},MB={m}]"] for i in (1, 2) for m in (0, 1)] for phase in "FB"]
    assert [len(set(found)) for found in middle] == [1, 1]


def test_bodies_ask_no_generator() -> None:
    job = program_of("dropout").apply(strategy_of("pp2", "1f1b")).lower(optimizer=ADAMW)
    used = {task.body for found in job.plan.classes for task in found.tasks if task.kind == "run"}
    targets = []
    for name in used:
        for node in decode(job.bodies[name]).graph.nodes:
            if node.op == "call_function":
                assert not draws_random(node.target, node.args, node.kwargs)
                targets.append(str(node.target))
    assert "piper.keyed_uniform.default" in targets


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.gumbel_softmax(x),
        lambda x: x + torch.randn(6, dtype=x.dtype),
        lambda x: x * torch.empty(6, dtype=x.dtype).uniform_(1, 2),
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: torch.native_dropout(x, 0.5, True)[0],  # what dropout is on CUDA
        lambda x: F.feature_alpha_dropout(x, 0.5),
        lambda x: x * torch.bernoulli(x.sigmoid()),
        lambda x: x[:, torch.randperm(x.shape[1])],
        lambda x: (
            x + x.softmax(-1).flatten(0, 1).multinomial(2).view(*x.shape[:2], 2).sum(-1, True)
        ),
        lambda x: x * x.new_zeros(x.shape).normal_().detach(),
        lambda x: torch.distributions.Normal(x, 0.5, validate_args=False).rsample(),
    ],
)
def test_random_operations_train_like_one_device(draw: Callable[..., torch.Tensor]) -> None:
    model = two(lambda self, x: self.run_stages(lambda: draw(self.a(x)), lambda h: draw(self.b(h))))
    check(model, strategy=parallel(pp=2, dp=2, microbatches=2))


def test_random_code_that_two_stages_read_is_drawn_once() -> None:
    """Unlike masks that each reader makes for itself; in the end it cancels out."""

    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(6, dtype=x.dtype) + 1
        with piper.annotate("PP"):
            x = self.a(x) * noise
        with piper.annotate("PP"):
            return x / noise

    def plain(self: Two, x: torch.Tensor) -> torch.Tensor:
        return self.run_stages(lambda: self.a(x), lambda h: h * 1)

    check(two(forward))
    losses = []
    for model in (two(forward), two(plain)):
        job = piper.trace(
            lambda model=model: model().double(), random_batch(0), lambda m, x: m(x).square().mean()
        ).apply(parallel(pp=2, microbatches=2))
        with job.lower().launch("loopback") as run:
            losses.append(run.step(random_batch(0)).loss)
    assert abs(losses[0] - losses[1]) < 1e-12


def test_a_stage_without_gradient_draws_too() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = F.dropout(x, 0.5) + torch.empty(6, dtype=x.dtype).uniform_()
        with piper.annotate("PP"):
            return self.b(h)

    check(two(forward))


def test_counts_may_be_random() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> Any:
        keep = torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.7, dtype=x.dtype))
        return (model(x).square() * keep).sum(), keep.sum() + 1

    check(two(lambda self, x: self.run_stages(lambda: self.a(x), self.b)), step=step)


def _dropped(rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor, counts: Any) -> torch.Tensor:
    return F.dropout(GM(rows, w, counts), 0.5)


def test_experts_that_draw_are_whole_on_every_rank() -> None:
    check(lambda: Sharded(_dropped), strategy=parallel(dp=2, microbatches=2))


def test_experts_that_draw_cannot_be_sharded() -> None:
    program = piper.trace(
        lambda: Sharded(_dropped).double(), random_batch(0), lambda m, x: m(x).sum()
    )
    with pytest.raises(ShardError, match=r"draws random numbers: dropout \(.*test_random.py:\d+\)"):
        program.apply(parallel(dp=2, ep=2, microbatches=2))


@pytest.mark.parametrize(
    "draw", [lambda x: torch.poisson(x.exp()), lambda x: torch._standard_gamma(x.exp())]
)
def test_operators_without_a_keyed_form_are_refused(draw: Callable[..., torch.Tensor]) -> None:
    model = two(lambda self, x: self.b(draw(self.a(x))))
    with pytest.raises(
        TraceError, match=r"draws random numbers by aten\..* \(.*test_random.py:\d+"
    ):
        piper.trace(lambda: model().double(), random_batch(0), lambda m, x: m(x).sum())


def _one_device(forward: Callable[..., torch.Tensor]) -> Errors:
    """Of a model that changes Python state, which a plan does not."""
    with pytest.warns(UserWarning, match="changes Python state"):
        program = piper.trace(lambda: two(forward)().double(), random_batch(0), mean_square)
        job = program.apply(parallel(dp=2, microbatches=2)).lower()
    reference = train_one_device(job, [random_batch(0)])
    with job.launch("loopback") as run:
        return compare(run, [random_batch(0)], reference)


def test_one_device_runs_the_users_module_and_not_its_trace() -> None:
    """What the trace leaves out is seen although the model has dropout."""

    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return F.dropout(self.a(x), 0.5) * self.calls

    errors = _one_device(forward)
    assert not errors.exact and errors.loss > 0.1


@pytest.mark.parametrize(
    ("after_one_call", "words"),
    [
        (lambda x: F.dropout(F.dropout(x)), r"also draws by aten.bernoulli_.*trace has 1"),
        (lambda x: x * 2, r"has 0 random operators, its trace 1; .* \(.*test_random.py:\d+\)"),
        (lambda x: x + torch.rand_like(x), "aten.rand_like.default, in its trace it is aten.bern"),
    ],
)
def test_one_device_that_draws_otherwise_than_the_trace_is_an_error(
    after_one_call: Callable[..., torch.Tensor], words: str
) -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.b(F.dropout(x) if self.calls == 1 else after_one_call(x))

    with pytest.raises(RunError, match=words):
        _one_device(forward)


def test_draws_that_nothing_depends_on_take_no_key() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return self.run_stages(
            lambda: F.dropout(self.a(x)), lambda h: (F.dropout(h), self.b(F.dropout(h)))[1]
        )

    check(two(forward))


def test_the_command_verify_knows_randomness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dropping.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))\n"
        "def batch(): return torch.randn(8, 6)\n"
        "def step(model, batch): return model(batch).square().mean()\n"
    )
    assert main(["verify", str(file), "--dp", "2", "--microbatches", "2", "--adversary"]) == 0
    assert capsys.readouterr().out.strip().endswith("exact")
