"""Keyed randomness: a pure function of its key, with the distributions and gradients of torch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piper.bodies.operators import RandomWatch
from piper.bodies.random.keyed import has_keyed_form, keyed
from piper.bodies.random.uniform import keyed_uniform
from piper.errors import TraceError
from piper.plan.keys import indexes_in, key_of, ranges_of

N = 100_000
KEYS = torch.tensor([key_of(0, step=0, index=i, microbatch=0) for i in range(4)])


def uniform(key: int, draw: int = 0, n: int = N, dtype: torch.dtype = torch.float64) -> Any:
    return keyed_uniform(torch.tensor([key]), 0, draw, [n], dtype)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@pytest.mark.parametrize("key", [0, 1, -1, 2**62, int(KEYS[0])])
def test_uniform_numbers_are_uniform(key: int) -> None:
    u = uniform(key)
    assert u.min() >= 0 and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / N)
    assert abs(float(u.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    counts = torch.histc(u, 100, 0, 1)
    chi_square = float(((counts - N / 100) ** 2 / (N / 100)).sum())
    assert 99 - 5 * math.sqrt(198) < chi_square < 99 + 5 * math.sqrt(198)
    low = (u * 2**53).long() & 0xFF  # the last digits are as random as the first
    assert abs(float(low.double().mean()) - 127.5) < 5 * 74 / math.sqrt(N)


def test_keys_draws_and_positions_are_uncorrelated() -> None:
    bound = 5 / math.sqrt(N)
    u = uniform(7)
    for lag in (1, 2, 64, 1024):
        assert abs(correlation(u[:-lag], u[lag:])) < bound
    for other in (uniform(8), uniform(7 + 2**40), uniform(7, draw=1), uniform(8, draw=1)):
        assert abs(correlation(u, other)) < bound
        assert not (u == other).any()
    first = torch.stack(
        [uniform(key, n=1)[0] for key in range(2000)]
    )  # across keys, as across steps
    assert abs(float(first.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / 2000)
    assert abs(correlation(first[:-1], first[1:])) < 5 / math.sqrt(2000)


def test_known_numbers_stay() -> None:
    """Of splitmix64 itself: a run may be continued by another version."""
    mask = 2**64 - 1

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    stride = 0x9E3779B97F4A7C15
    start = mixed((7 + 3 * stride) & mask)
    wanted = [(mixed((start + i * stride) & mask) >> 11) * 2.0**-53 for i in range(5)]
    assert uniform(7, draw=2, n=5).tolist() == wanted
    assert key_of(0, step=1, index=2, microbatch=3) == 4604495310465205243


def test_blocks_of_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = uniform(3, n=1000)
    monkeypatch.setattr("piper.bodies.random.uniform._BLOCK", 64)
    assert torch.equal(uniform(3, n=1000), whole)
    assert uniform(3, n=0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_stays_below_one(dtype: torch.dtype) -> None:
    u = uniform(3, dtype=dtype)
    assert u.dtype == dtype and float(u.max()) < 1
    assert abs(float(u.double().mean()) - 0.5) < 0.01


X = torch.full((N,), 0.3, dtype=torch.float64)
WEIGHTS = torch.tensor([0.0, 0.1, 0.6, 0.3], dtype=torch.float64).expand(N, 4)
DRAWS: dict[str, tuple[Callable[..., torch.Tensor], float, float]] = {  # with mean and variance
    "rand": (lambda: torch.rand(N), 1 / 2, 1 / 12),
    "rand_like": (lambda: torch.rand_like(X), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(N, dtype=torch.float64), 0, 1),
    "randn_like": (lambda: torch.randn_like(X), 0, 1),
    "randn of bfloat16": (lambda: torch.randn(N, dtype=torch.bfloat16), 0, 1),
    "randint": (lambda: torch.randint(2, 5, (N,)), 3, 2 / 3),
    "randint_like": (lambda: torch.randint_like(X, 5), 2, 2),
    "random_": (lambda: torch.empty(N).random_(2, 5), 3, 2 / 3),
    "bernoulli": (lambda: torch.bernoulli(X), 0.3, 0.21),
    "bernoulli of p": (lambda: torch.bernoulli(X, 0.8), 0.8, 0.16),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, 0.21),
    "bernoulli_ of a tensor": (lambda: torch.empty(N).bernoulli_(X), 0.3, 0.21),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1, 16 / 12),
    "normal_": (lambda: torch.empty(N).normal_(2, 3), 2, 9),
    "normal": (lambda: torch.normal(2.0, 3.0, (N,)), 2, 9),
    "normal of tensors": (lambda: torch.normal(X, X), 0.3, 0.09),
    "normal of a mean": (lambda: torch.normal(X, 2.0), 0.3, 4),
    "exponential_": (lambda: torch.empty(N).exponential_(2), 0.5, 0.25),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0, 0.5), math.exp(0.125), 0.3646959),
    "geometric_": (lambda: torch.empty(N).geometric_(0.4), 2.5, 3.75),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1, 2).sub(1).sign(), 0, 1),
    "multinomial": (lambda: WEIGHTS.multinomial(1).double(), 2.2, 0.36),
    "multinomial of two": (lambda: WEIGHTS.multinomial(2).sum(1).double(), 4.490476, 0.683243),
    "multinomial again": (lambda: WEIGHTS[0].multinomial(N, replacement=True).double(), 2.2, 0.36),
    "dropout": (lambda: F.dropout(X, 0.4), 0.3, 0.06),
    "dropout in place": (lambda: F.dropout(X.clone(), 0.4, inplace=True), 0.3, 0.06),
    "native_dropout": (lambda: torch.native_dropout(X, 0.4, True)[0], 0.3, 0.06),
    "rrelu": (lambda: F.rrelu(-X, 0.1, 0.3, training=True), -0.06, 0.09 / 300),
    "gumbel": (lambda: F.gumbel_softmax(torch.zeros(N, 2), hard=True)[:, 0], 0.5, 0.25),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name: str) -> None:
    draw, mean, variance = DRAWS[name]
    state = torch.get_rng_state()
    call = keyed(draw, 0)
    got = call(KEYS).double()
    assert torch.equal(torch.get_rng_state(), state), "no generator was asked"
    assert torch.equal(call(KEYS).double(), got), "the same key, the same numbers"
    assert not torch.equal(keyed(draw, 1)(KEYS).double(), got)
    assert abs(float(got.mean()) - mean) < 5 * math.sqrt(variance / N) + 1e-9
    assert abs(float(got.var()) - variance) < 0.05 * variance
    torch.manual_seed(0)
    theirs = draw()
    assert theirs.dtype == call(KEYS).dtype and theirs.shape == call(KEYS).shape
    assert abs(float(theirs.double().mean()) - mean) < 5 * math.sqrt(variance / N) + 1e-9


def test_permutations() -> None:
    first, second = (keyed(torch.randperm, i)(KEYS, 50) for i in (0, 1))
    assert first.sort().values.tolist() == list(range(50))
    assert first.tolist() != second.tolist() and first.tolist() != list(range(50))
    counts = torch.zeros(3, 3)
    for key in range(900):
        order = keyed(torch.randperm, 0)(torch.tensor([key]), 3)
        counts[torch.arange(3), order] += 1
    assert (counts - 300).abs().max() < 5 * math.sqrt(200)


def test_memory_formats_are_those_of_torch() -> None:
    def chance(x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(x, 0.5)

    x = torch.zeros(4, 6).t()
    for draw in (torch.rand_like, torch.randn_like, torch.bernoulli, chance, F.dropout):
        assert keyed(draw, 0)(KEYS, x).stride() == draw(x).stride()
    filled = torch.zeros(4, 6).t()
    assert keyed("uniform_", 0)(KEYS, filled) is filled
    assert filled.std() > 0.1


def test_draws_in_one_call_differ() -> None:
    one, other = keyed(lambda: (torch.rand(8), torch.rand(8)), 0)(KEYS)
    assert not (one == other).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: F.rrelu(x, training=True),
        lambda x: F.alpha_dropout(x, 0.4),
        lambda x: F.gumbel_softmax(x, tau=2.0),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
        lambda x: x + torch.randn_like(x) * x,
        lambda x: x * torch.bernoulli(x.sigmoid()),
    ],
)
def test_gradients_are_those_of_the_numbers_drawn(call: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: keyed(call, 0)(KEYS, x), x.requires_grad_())


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.poisson(torch.ones(3)),
        lambda: torch._standard_gamma(torch.ones(3)),
        lambda: torch.binomial(torch.ones(3), torch.ones(3)),
        lambda: torch.rand(3, out=torch.empty(3)),
        lambda: torch.rand(3, generator=torch.Generator()),
        lambda: torch.empty(3).random_(),
        lambda: torch.randn(3, dtype=torch.complex64),
    ],
)
def test_what_cannot_be_keyed_is_refused(call: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TraceError, match=r"cannot be keyed|not supported"):
        keyed(call, 0)(KEYS)


def test_what_is_known_to_have_a_keyed_form() -> None:
    with RandomWatch() as watch:
        F.dropout(torch.ones(3))
        torch.poisson(torch.ones(3))
        torch.rand(3, out=torch.empty(3))
    assert [has_keyed_form(operator) for operator in watch.seen] == [True, False, False]


def test_indexes_as_ranges() -> None:
    for indexes in ([0], [3, 4, 5], [0, 1, 2, 5, 7, 8], [4, 3, 2]):
        assert indexes_in(ranges_of(indexes)) == indexes
    assert ranges_of([0, 1, 2, 5]) == "0-2,5"


def test_keys_differ_in_every_part() -> None:
    base = {"step": 1, "index": 2, "microbatch": 3}
    found = {key_of(0, **base), key_of(1, **base)}
    found |= {key_of(0, **(base | {name: 9})) for name in base}
    found |= {key_of(0, step=12, index=3, microbatch=4), key_of(0, step=1, index=23, microbatch=4)}
    assert len(found) == 7
    assert all(0 <= key < 2**63 for key in found)
