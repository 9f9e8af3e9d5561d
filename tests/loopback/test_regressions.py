"""Programs that once trained wrongly or crashed; each is legal and must be exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.errors import RunError
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.loopback.programs import GM, Sharded, Two, check, mean_square, random_batch, two


def test_changes_in_place_pass_gradients_on() -> None:
    def added(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = self.a(x)
        with piper.annotate("PP"):
            y = self.b(x)
            y.add_(h)
            return y

    def written(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = self.a(x)
        with piper.annotate("PP"):
            y = torch.zeros_like(h)
            y[:, 0] = h[:, 0]
            y[:, 1].add_(h[:, 2])
            return self.b(y)

    def from_a_parameter(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = self.a(x)
        with piper.annotate("PP"):
            w = torch.zeros(6, 6, dtype=x.dtype)
            w[:3] = self.b.weight[:3]
            return h @ w

    def untagged(self: Two, x: torch.Tensor) -> torch.Tensor:
        w = torch.zeros(6, 6, dtype=x.dtype)
        w[:3] = self.b.weight[:3]
        with piper.annotate("PP"):
            h = self.a(x) @ w
        with piper.annotate("PP"):
            return self.c(h) @ w

    for forward in (added, written, from_a_parameter, untagged):
        check(two(forward))


def test_linear_algebra_whose_checks_have_an_order() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = x @ torch.linalg.inv(self.a.weight + 3 * torch.eye(6, dtype=x.dtype))
        with piper.annotate("PP"):
            return self.b(h) * torch.linalg.eigvals(self.c.weight).abs().sum()

    check(two(forward))


def test_changes_in_place_of_masks_are_kept() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(5, 6, dtype=x.dtype)
        mask[0] = 0.25
        mask.tril_()
        with piper.annotate("PP"):
            h = torch.tanh(self.a(x)) * mask
        with piper.annotate("PP"):
            return self.b(h) * mask

    check(two(forward))


def test_what_runs_without_gradient_passes_none_on() -> None:
    def in_place(self: Two, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 1
        with torch.no_grad():
            h.mul_(0.5)
        return self.b(h)

    def copied(self: Two, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.no_grad():
            k = torch.zeros_like(h)
            k.copy_(h)
            k[:, 2:] = self.c.bias
            torch.add(k, h, out=k)
        return self.b(h) * k

    for forward in (in_place, copied):
        check(two(forward), strategy=parallel(dp=2, microbatches=2))


def test_changes_through_views_of_hidden_results() -> None:
    """A Linear of 3-D input returns a view of a product that no node holds."""

    def element(self: Two, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h[:, 3].add_(self.c.bias)
        h[..., 0].mul_(2)
        return self.b(h)

    def transposed(self: Two, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).transpose(0, 1)
        h += self.c.bias
        h[0] *= self.c.weight[0]
        return self.b(h)

    def stale_parts(self: Two, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 1
        one, other = h.chunk(2, -1)
        k = one + other
        h.mul_(2)
        return self.b(h) + k.sum()

    def between_stages(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = self.a(x)
            v = h[:, 0]
            h.mul_(self.c.bias)
        with piper.annotate("PP"):
            return self.b(v)

    for forward in (element, transposed, stale_parts):
        check(two(forward), strategy=parallel(dp=2, microbatches=2))
    check(two(between_stages))


def test_initial_values_of_other_views() -> None:
    polar = [torch.ones(6, 3), torch.arange(18.0).view(6, 3)]

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, dtype=torch.float64)
            turn = torch.polar(*(torch.ones(6, 3).double(), torch.arange(18.0).view(6, 3).double()))
            self.register_buffer("conjugate", turn.conj())
            self.register_buffer("pairs", torch.view_as_real(turn))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * self.conjugate.imag.sum() * self.pairs.sum()

    job = piper.trace(Views, random_batch(0), mean_square).lower()
    with job.launch("single") as run:
        held = run.workers.workers[0].tensors("buffer")
    turn = torch.polar(*(part.double() for part in polar))
    assert torch.allclose(held["conjugate"], turn.conj().resolve_conj())
    assert torch.allclose(held["pairs"], torch.view_as_real(turn))


def test_functions_of_one_name_have_bodies_of_their_own() -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.v = nn.ParameterList(torch.randn(6, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                x = self.a(x)
            with piper.annotate("PP"):
                x = F.linear(F.max_pool1d(x, 3), self.v[0])
            with piper.annotate("PP"):
                x = F.linear(F.adaptive_max_pool1d(x, 2), self.v[1])
            with piper.annotate("PP"):
                return x * 1

    check(Pools, strategy=parallel(pp=4, microbatches=2))


def test_a_parameter_read_without_gradient_on_another_slice() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = torch.tanh(self.a(x))
        with piper.annotate("PP"):
            return self.b(h) + F.linear(h, self.a.weight.detach())

    check(two(forward))


def test_switched_off_randomness_is_none() -> None:
    check(two(lambda self, x: self.b(F.dropout(F.rrelu(self.a(x)), 0.5, training=False))),
          strategy=parallel(dp=2))  # fmt: skip


def test_numbers_in_a_batch_are_part_of_the_code() -> None:
    def forward(self: Two, batch: Any) -> torch.Tensor:
        return self.b(torch.tanh(self.a(batch["x"]))) * batch["scale"]

    check(
        two(forward), batch=lambda s: {"x": random_batch(s), "scale": 2.0}, strategy=parallel(dp=2)
    )
    model = two(forward)
    job = piper.trace(
        lambda: model().double(), {"x": random_batch(0), "scale": 2.0}, mean_square
    ).lower()
    with job.launch("single") as run, pytest.raises(RunError, match=r"scale is 3.0, but .* 2.0"):
        run.step({"x": random_batch(0), "scale": 3.0})


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(lambda model, total: model.n, id="buffer"),
        pytest.param(lambda model, total: torch.tensor(4.0), id="constant"),
    ],
)
def test_counts_of_any_origin(count: Callable[..., torch.Tensor]) -> None:
    class Counted(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.tensor(4.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run_stages(lambda: torch.tanh(self.a(x)), self.b)

    def step(model: nn.Module, batch: torch.Tensor) -> Any:
        total = model(batch).square().sum()
        return total, count(model, total)

    check(Counted, step=step)


def test_a_loss_of_one_element_in_a_row() -> None:
    check(
        two(lambda self, x: self.run_stages(lambda: self.a(x), self.b)),
        step=lambda model, batch: model(batch).square().mean().reshape(1),
        strategy=parallel(pp=2, dp=2, microbatches=2),
    )


def test_copies_and_derived_tensors_agree_with_their_origin() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = copy.deepcopy(self.a)
            self.register_buffer("norm", self.a.weight.detach().norm())
            rates = [float(i) for i in torch.linspace(0, 1, 3)]
            self.c = nn.Parameter(torch.full((6,), rates[1]))
            self.d = nn.Parameter(nn.init.trunc_normal_(torch.empty(6, 6), std=0.5, a=-0.6, b=0.6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) * self.norm * self.c @ self.d

    job = piper.trace(lambda: Copied().double(), random_batch(0), mean_square).lower()
    with job.launch("single") as run:
        params = run.parameters()
        [norm] = run.workers.workers[0].tensors("buffer").values()
    assert torch.equal(params["a.weight"], params["b.weight"])
    assert torch.allclose(norm, params["a.weight"].norm(), rtol=1e-6)
    assert torch.equal(params["c"], torch.full((6,), 0.5, dtype=torch.float64))
    assert params["d"].abs().max() <= 0.6 and 0.2 < params["d"].std() < 0.45
    check(Copied, strategy=parallel(dp=2))


def test_parameters_read_for_their_shape_alone_are_left_alone() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h, g = torch.tanh(self.a(x)), self.b(x)
        with piper.annotate("PP"):
            return self.c(h).expand_as(g)

    check(two(forward))


def test_names_of_parameters_and_leaves_are_free() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch, self.grad = nn.Linear(6, 6), nn.Linear(6, 6)
            self.one, self.loss, self.count = (nn.Parameter(torch.ones(6)) for _ in range(3))
            self.saved = nn.ParameterList(torch.ones(6) for _ in range(2))
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, batch: Any) -> torch.Tensor:
            with piper.annotate("PP"):
                x = self.grad(self.batch(batch["x[0]"]) @ batch["weight"][0]) * self.one
            with piper.annotate("PP"):
                x = x * self.saved[0] * self.loss + self.count * batch["a"]["b.c"]
                return x * self.saved[1] * self.weight

    def batch(seed: int) -> Any:
        x = random_batch(seed)
        square = x[:, :1].transpose(1, 2) @ x[:, :1]
        return {"x[0]": x, "weight": square, "a": {"b.c": x + 1}}

    check(Named, batch=batch)


def test_a_stage_without_gradient_that_makes_tensors() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = x + torch.arange(6, dtype=x.dtype) * torch.tensor(0.5)
        with piper.annotate("PP"):
            return self.b(h)

    check(two(forward))


def test_batches_need_not_be_contiguous() -> None:
    def batch(seed: int) -> torch.Tensor:
        return random_batch(seed).transpose(1, 2).contiguous().transpose(1, 2)

    assert not batch(0).is_contiguous()
    check(
        two(lambda self, x: self.run_stages(lambda: self.a(x.reshape(-1, 6)), self.b)), batch=batch
    )


def test_dead_code_is_dropped() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.c(x)
        return self.run_stages(lambda: self.a(x), self.b)

    check(two(forward))


def test_lazy_conjugates_between_stages() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            h = torch.complex(self.a(x), x).conj()
        with piper.annotate("PP"):
            return self.b(torch.view_as_real(h * (1 + 2j)).sum(-1))

    check(two(forward))


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) * batch["w"]).sum(), batch["w"].sum()

    model = two(lambda self, x: self.run_stages(lambda: self.a(x), self.b))
    good = {"x": random_batch(0), "w": torch.ones(8, 1, 1, dtype=torch.float64)}
    job = piper.trace(lambda: model().double(), good, step)
    run = job.apply(parallel(pp=2, dp=2, microbatches=2)).lower().launch("loopback")
    with pytest.raises(RunError, match="the total count of the batch is 0"):
        run.step({"x": good["x"], "w": good["w"] * 0})
    with pytest.raises(RunError, match="the total count of the batch is -8"):  # else it would climb
        run.step({"x": good["x"], "w": -good["w"]})
    assert run.step(good).count == 8.0


@pytest.mark.parametrize(
    "inside",
    [
        lambda r, w, b, c: F.layer_norm(GM(r, w, c), (6,)).softmax(-1) * r.sum(1, keepdim=True),
        lambda r, w, b, c: GM(F.silu(GM(r, w, c)), w.transpose(1, 2) * 0.5, c)[:, :] + r,
        lambda r, w, b, c: torch.cat([GM(r, w, c)[:, :3], r[:, 3:]], 1).view(-1, 2, 3).flatten(1),
        lambda r, w, b, c: GM(torch.cat([r, r * 0 + 1], 1), torch.cat([w, w.tanh()], 1), c),
    ],
)
def test_row_wise_regions_are_sharded_exactly(inside: Any) -> None:
    check(lambda: Sharded(inside), strategy=parallel(dp=2, ep=2, microbatches=2))


def test_weights_from_elsewhere() -> None:
    """Small tensors become part of the initial values; a file's are refused."""
    held = {"weight": torch.eye(6), "bias": torch.zeros(6)}

    class Loaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.a.load_state_dict(held)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    job = piper.trace(lambda: Loaded().double(), random_batch(0), mean_square).lower()
    with job.launch("single") as run:
        assert torch.equal(run.parameters()["a.weight"], torch.eye(6).double())


def test_directives_of_two_axes_commute_for_a_tied_parameter() -> None:
    """`prefetch` means nothing without ZeRO 3, so that it cannot keep a parameter in two ways."""

    def tied(self: Two, x: torch.Tensor) -> torch.Tensor:
        return self.run_stages(lambda: self.a(x), lambda h: self.a(h) + self.b(h))

    def strategy(s: piper.Schedule) -> None:
        s.mesh(dp=2, ep=1)
        s.replicate(piper.where(PP=0), over="dp", zero=2)
        s.replicate(piper.where(PP=0), over="ep", prefetch=3)
        s.replicate(piper.where(PP=1), over="ep")
        s.replicate(piper.where(PP=1), over="dp", zero=2, prefetch=2, reuse="step")

    check(two(tied), strategy=strategy)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_parameters_are_cut_too_where_all_is_cut(zero: int) -> None:
    """Parameters that nobody trains have no gradient and no Update; under ZeRO 3 each rank still holds
    only its part of them."""

    class Frozen(Two):
        def __init__(self) -> None:
            super().__init__()
            self.a.requires_grad_(False)
            self.b.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run_stages(lambda: torch.tanh(self.b(self.a(x))), self.c)

    strategy = parallel(pp=2, dp=2, zero=zero, microbatches=2, schedule="zb_h1")
    check(Frozen, strategy=strategy)
    program = piper.trace(lambda: Frozen().double(), random_batch(0), mean_square)
    with program.apply(strategy).lower().launch("loopback") as run:
        held = run.workers.workers[0].tensors("param")
    frozen = {"a.weight", "a.bias", "b.weight"}
    elements = sum(t.numel() for key, t in held.items() if key.startswith(tuple(frozen)))
    every = sum(p.numel() for name, p in Frozen().named_parameters() if name in frozen)
    assert elements == every if zero < 3 else elements <= every / 2 + 8, "a bucket has some padding"


def test_dropout_of_everything_draws_nothing() -> None:
    class All(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run_stages(lambda: F.dropout(self.a(x), 1.0) + self.b(x), self.c)

    check(All)


def test_a_receive_that_an_order_names_stays_where_it_is() -> None:
    """Receives are held back until shortly before their use, but not those that the user has placed."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2)
        for stage in range(2):
            s.place(piper.where(PP=stage), mesh.at(pp=stage))
        s.split(piper.where(), "MB", 8)
        early = piper.where(comm="recv", PP=1, MB=5)
        s.order([early, piper.where(PP=1, MB=0, phase="F")])

    check(two(lambda self, x: self.run_stages(lambda: self.a(x), self.b)), strategy=strategy)


@pytest.mark.parametrize("late", [False, True])
def test_nesterov_adds_nothing_to_gradients(late: bool) -> None:
    """With foreach, torch adds Nesterov's momentum into the gradients themselves."""
    make = two(lambda self, x: self.run_stages(lambda: torch.tanh(self.a(x)), self.b))
    program = piper.trace(lambda: make().double(), random_batch(0), mean_square)
    optimizer = piper.sgd(lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    clip = 0.05 if late else None
    job = program.apply(parallel(pp=2, dp=2, zero=1, microbatches=2)).lower(
        optimizer=optimizer, clip=clip, late_clip=late
    )
    batches = [random_batch(seed) for seed in range(3)]
    reference = train_one_device(job, batches)
    with job.launch("loopback") as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


def test_late_clipping_shows_a_norm_that_is_no_number() -> None:
    """As with clipping in time, and as in torch: every parameter shows it."""

    class Broken(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run_stages(lambda: self.a(x), lambda h: (self.b(h) - self.b(h)).sqrt())

    program = piper.trace(lambda: Broken().double(), random_batch(0), mean_square)
    for late in (False, True):
        job = program.apply(parallel(pp=2, microbatches=2)).lower(clip=0.1, late_clip=late)
        with job.launch("loopback") as run:
            run.step(random_batch(0))
            trained = [p for name, p in run.parameters().items() if name[0] in "ab"]
            assert len(trained) == 4 and all(bool(p.isnan().any()) for p in trained)


def test_a_reduction_that_an_order_names_stays_where_it_is() -> None:
    """Whole gradients are reduced as soon as they are there, but not those that the user has placed."""

    def strategy(s: piper.Schedule) -> None:
        s.mesh(dp=2)
        s.replicate(piper.where(), over="dp", zero=2, reduce_every=1)
        s.split(piper.where(), "MB", 4)
        late = piper.where(PP=1, MB=0, comm="reduce_scatter")
        s.order([piper.where(PP=0, MB=3, phase="B"), late])

    check(two(lambda self, x: self.run_stages(lambda: self.a(x), self.b)), strategy=strategy)
