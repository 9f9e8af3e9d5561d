"""Programs that once trained wrongly, crashed or were refused; each is legal and must be exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.directives.schedule import Schedule
from piper.errors import MeshError, OrderError, PlanError, RunError, TraceError
from piper.strategies import parallel
from piper.train.verify import compare, train_one_device


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def check(
    make: Callable[[], nn.Module],
    *,
    batch: Callable[[int], Any] = _batch,
    step: Callable[..., Any] = _mean_square,
    strategy: Callable[[Schedule], None] | None = None,
) -> None:
    strategy = strategy or parallel(pp=2, microbatches=2)
    program = piper.trace(lambda: make().double(), batch(0), step).apply(strategy)
    job = program.lower(optimizer=piper.adamw(lr=1e-2))
    batches = [batch(seed) for seed in range(3)]
    reference = train_one_device(job, batches)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary) as run:
            errors = compare(run, batches, reference)
        assert errors.exact, errors


def refused(make: Callable[[], nn.Module], words: str, step: Any = _mean_square) -> None:
    with pytest.raises(TraceError, match=words):
        piper.trace(lambda: make().double(), _batch(0), step)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def run_stages(self, first: Any, second: Any) -> Any:
        with piper.annotate("PP"):
            h = first()
        with piper.annotate("PP"):
            return second(h)


def two(forward: Callable[..., torch.Tensor]) -> type[Two]:
    return type("Model", (Two,), {"forward": forward})


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

    job = piper.trace(Views, _batch(0), _mean_square).lower()
    with job.launch("single") as run:
        held = run.workers.worker.tensors("buffer")  # type: ignore[attr-defined]
    turn = torch.polar(*(part.double() for part in polar))
    assert torch.allclose(held["conjugate"], turn.conj().resolve_conj())
    assert torch.allclose(held["pairs"], torch.view_as_real(turn))


def test_changes_in_place_that_cannot_be_kept_are_refused() -> None:
    def by_position(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            g = self.b(h * 1)
        with piper.annotate("PP", 0):
            F.relu(h, True)
        with piper.annotate("PP", 1):
            return g + h

    refused(two(by_position), "changed in place that other regions made or have read")


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


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.gumbel_softmax(x),
        lambda x: x + torch.randn(6, dtype=x.dtype),
        lambda x: F.dropout(x, 0.5),
    ],
)
def test_every_random_operation_is_refused(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    refused(two(lambda self, x: self.b(draw(self.a(x)))), r"is random \(.*test_regressions")


def test_switched_off_randomness_is_none() -> None:
    check(two(lambda self, x: self.b(F.dropout(F.rrelu(self.a(x)), 0.5, training=False))),
          strategy=parallel(dp=2))  # fmt: skip


def test_numbers_in_a_batch_are_part_of_the_code() -> None:
    def forward(self: Two, batch: Any) -> torch.Tensor:
        return self.b(torch.tanh(self.a(batch["x"]))) * batch["scale"]

    check(two(forward), batch=lambda s: {"x": _batch(s), "scale": 2.0}, strategy=parallel(dp=2))
    model = two(forward)
    job = piper.trace(
        lambda: model().double(), {"x": _batch(0), "scale": 2.0}, _mean_square
    ).lower()
    with job.launch("single") as run, pytest.raises(RunError, match=r"scale is 3.0, but .* 2.0"):
        run.step({"x": _batch(0), "scale": 3.0})


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


def test_complex_parameters_are_refused() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.randn(6, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.c).abs()

    with pytest.raises(TraceError, match="parameter c is complex"):
        piper.trace(Complex, _batch(0), _mean_square)


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

    job = piper.trace(lambda: Copied().double(), _batch(0), _mean_square).lower()
    with job.launch("single") as run:
        params = run.parameters()
        [norm] = run.workers.worker.tensors("buffer").values()  # type: ignore[attr-defined]
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
        x = _batch(seed)
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


def test_operators_with_code_inside_are_refused() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.b(checkpoint(self.a, x, use_reentrant=False))

    refused(two(forward), r"is not supported \(.*test_regressions.*\n.*checkpoint")


def test_batches_need_not_be_contiguous() -> None:
    def batch(seed: int) -> torch.Tensor:
        return _batch(seed).transpose(1, 2).contiguous().transpose(1, 2)

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


def test_orders_of_communication_that_cannot_be_are_refused() -> None:
    model = two(lambda self, x: self.run_stages(lambda: self.a(x), self.b))

    def crossed(s: Schedule) -> None:
        parallel(pp=2, microbatches=2)(s)
        s.order([where(comm="recv", PP=1, MB=1), where(comm="recv", PP=1, MB=0)])

    program = piper.trace(lambda: model().double(), _batch(0), _mean_square)
    with pytest.raises(OrderError, match=r"order \(.*test_regressions.*wait for each other"):
        program.apply(crossed).lower()


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) * batch["w"]).sum(), batch["w"].sum()

    model = two(lambda self, x: self.run_stages(lambda: self.a(x), self.b))
    good = {"x": _batch(0), "w": torch.ones(8, 1, 1, dtype=torch.float64)}
    job = piper.trace(lambda: model().double(), good, step)
    run = job.apply(parallel(pp=2, dp=2, microbatches=2)).lower().launch("loopback")
    with pytest.raises(RunError, match="the total count of the batch is 0"):
        run.step({"x": good["x"], "w": good["w"] * 0})
    assert run.step(good).count == 8.0


class Sharded(nn.Module):
    """Two experts around `inside(rows, weight, bias, counts)`."""

    def __init__(self, inside: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inside = inside
        self.router, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        gate = self.router(rows)
        expert = gate.argmax(-1)
        counts = torch.zeros(4, dtype=torch.int64).scatter_add(0, expert, expert * 0 + 1)
        order = expert.argsort(stable=True)
        rows = rows.index_select(0, order)
        with piper.annotate("EP"):
            rows = self.inside(rows, self.weight, self.bias, counts)
        out = torch.zeros_like(gate[:, :1]).expand(-1, 6).clone()
        out[order] = rows
        return out * gate.softmax(-1).gather(1, expert[:, None])


GM = piper.grouped_mm


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (lambda r, w, b, c: GM(r, w, c) - r.mean(0), "rows: mean"),
        (lambda r, w, b, c: GM(r, w, c) - r.max(0).values, "rows: max"),
        (lambda r, w, b, c: GM(r, w, c) - r.sort(0).values, "rows: sort"),
        (lambda r, w, b, c: GM(r, w, c) - r.roll(1, 0), "rows: roll"),
        (lambda r, w, b, c: (r @ r.T).softmax(-1) @ GM(r, w, c), "rows: permute"),
        (lambda r, w, b, c: GM(r, w, c) + b.mean(0), "experts: mean"),
        (lambda r, w, b, c: GM(r, w.softmax(0), c), "experts: _softmax"),
        (lambda r, w, b, c: GM(r, w, c) @ w[0], "experts: select"),
        (lambda r, w, b, c: GM(r, w * (c / 10).view(-1, 1, 1), c), "counts with values"),
        (lambda r, w, b, c: GM(r, w, c) * (1 + c.sum()), "rows: mul"),
    ],
)
def test_regions_that_cannot_be_sharded_are_refused(inside: Any, what: str) -> None:
    program = piper.trace(lambda: Sharded(inside).double(), _batch(0), _mean_square)
    with pytest.raises(TraceError, match=f"the sharded region mixes {what}"):
        program.apply(parallel(dp=2, ep=2, microbatches=2)).lower()


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


def test_a_metric_is_no_count() -> None:
    """Returning (loss, accuracy) would divide by the accuracy."""

    def step(model: nn.Module, batch: torch.Tensor) -> Any:
        out = model(batch)
        return out.square().mean(), (out > 0).double().mean()

    refused(two(lambda self, x: self.a(x)), r"step's count depends on parameter a\.", step)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: self.a(x) / x.abs().max().item(), "takes a number out of a tensor"),
        (
            lambda self, x: self.a(x) * torch.bincount(x.long().flatten().abs()).sum(),
            "depends on data",
        ),
        (lambda self, x: print(x) or self.a(x), "remove the print"),
        (lambda self, x: self.a(x[..., :3]), r"does not trace .*3\] X \[6"),
        (lambda self, x: self.nothing(x), "has no attribute 'nothing'"),
    ],
)
def test_what_does_not_trace_says_why(forward: Any, words: str) -> None:
    refused(two(forward), words)


def test_state_that_forward_changes_is_warned_of() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.n = getattr(self, "n", 0) + 1
        return self.a(x) / self.n

    with pytest.warns(UserWarning, match="changes Python state"):
        piper.trace(lambda: two(forward)().double(), _batch(0), _mean_square)


def test_wrong_arguments_of_the_interface() -> None:
    model = two(lambda self, x: self.a(x))
    with pytest.raises(TraceError, match="legal: a function that makes it"):
        piper.trace(model(), _batch(0), _mean_square)
    program = piper.trace(lambda: model().double(), _batch(0), _mean_square)
    with pytest.raises(PlanError, match=r"legal: piper.adamw"):
        program.lower(optimizer="adamw")  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=r"legal: a slice: mesh.at"):
        program.apply(lambda s: s.place(where(), s.mesh(pp=1)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="did you mean 'place'"):
        program.apply(lambda s: s.plcae(where()))
    run = program.lower().launch("single")
    run.close()
    with pytest.raises(RunError, match="the run is closed"):
        run.step(_batch(0))


def test_a_batch_size_in_the_code_is_named() -> None:
    model = two(lambda self, x: self.a(x.view(40, 6)))
    program = piper.trace(lambda: model().double(), _batch(0), _mean_square)
    with pytest.raises(TraceError, match="with 4 samples, one rank's microbatch"):
        program.apply(parallel(dp=2)).lower()


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

    job = piper.trace(lambda: Loaded().double(), _batch(0), _mean_square).lower()
    with job.launch("single") as run:
        assert torch.equal(run.parameters()["a.weight"], torch.eye(6).double())
