"""Equal code on tensors of other shapes has bodies of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.bodies.files.body_fit import check_bodies
from piper.errors import PlanError
from piper.plan.tasks import Run
from piper.plan.types import Plan
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device

WIDTH = 8


class Stages(nn.Module):
    """Matrices of all shapes, and nothing else: no line of their code names a size."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 12, 12, 4)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
            with piper.annotate("PP"):
                x = torch.relu(x)
        return x


class Sums(nn.Module):
    """A bias is added in one piece, and two residuals in another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = (
            nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 16),
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.norm(self.embed(tokens))
        with piper.annotate("A"):
            a = self.down(F.silu(self.up(y)))
        with piper.annotate("Q"):
            return self.head(a + y)


def _check(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Tensor],
    step: Callable[[nn.Module, Tensor], Tensor],
    strategy: Callable[[piper.Schedule], None],
) -> Job:
    job = piper.trace(model, batch(0), step).apply(strategy).lower(optimizer=piper.adamw(lr=1e-2))
    batches = [batch(seed) for seed in range(3)]
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors
    return job


def _rows(seed: int) -> Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> Tensor:
    return torch.randint(16, (8, 8), generator=torch.Generator().manual_seed(seed))


def _stages(strategy: Callable[[piper.Schedule], None]) -> Job:
    return _check(
        lambda: Stages().double(), _rows, lambda model, x: model(x).square().mean(), strategy
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_stages_of_single_layers_train_like_one_device(pp: int) -> None:
    _stages(parallel(pp=pp, microbatches=2, **({"schedule": "looped_bfs"} if pp > 1 else {})))


def test_sums_of_cut_tensors_train_like_one_device() -> None:
    def strategy(s: piper.Schedule) -> None:
        s.mesh(tp=2)
        s.shard_tensor(piper.where(), over="tp", sequence={"*": 1})

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    _check(lambda: Sums().double(), _tokens, step, strategy)


def test_a_body_says_what_it_takes() -> None:
    """A saved plan whose tasks call the body of another layer is refused, if shapes differ."""
    job = _stages(parallel(pp=1, microbatches=2))
    texts, plan = job.bodies, job.plan
    check_bodies(plan, texts)
    runs = [t for t in plan.classes[0].tasks if isinstance(t, Run) and t.phase == "F"]
    first, second = runs[0].body, runs[2].body
    assert first != second
    with pytest.raises(PlanError, match=r"takes float64\[4,16\] for"):
        check_bodies(_calling(plan, first, second), texts)


def _calling(plan: Plan, was: str, now: str) -> Plan:
    (part,) = plan.classes
    tasks: Sequence = tuple(
        msgspec.structs.replace(t, body=now) if isinstance(t, Run) and t.body == was else t
        for t in part.tasks
    )
    return msgspec.structs.replace(plan, classes=(msgspec.structs.replace(part, tasks=tasks),))
