"""Random operations under a key: a captured call in, the same call as a pure function of keys out.

While the call runs, every ATen operator that would ask a generator is replaced by arithmetic on
`keyed_uniform`. Autograd sees the original operator, so gradients are those of torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from piper.bodies.operators import bound_arguments, draws_random
from piper.bodies.random.uniform import keyed_uniform
from piper.errors import TraceError

Given = dict[str, Any]  # an operator's arguments by name, defaults filled in


@functools.cache  # so that equal calls are one object, and chunks that make them have equal bodies
def keyed(operation: Callable[..., Any] | str, position: int) -> Callable[..., Any]:
    """`operation` (a string is a method) with a tensor of keys in front, of which it uses one."""

    def call(keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Fused attention would draw inside of its kernel, on each kind of device in its own way.
        with sdpa_kernel(SDPBackend.MATH), Keyed(keys, position):
            if isinstance(operation, str):
                return getattr(args[0], operation)(*args[1:], **kwargs)
            return operation(*args, **kwargs)

    name = operation if isinstance(operation, str) else getattr(operation, "__name__", "call")
    call.__name__ = call.__qualname__ = f"keyed_{position}_{name}"
    return call


def has_keyed_form(operator: Any) -> bool:
    """Whether a random operator can be computed from a key."""
    schema = operator._schema
    if operator.namespace != "aten" or any(argument.is_out for argument in schema.arguments):
        return False
    return schema.name.removeprefix("aten::") in (*_FILLS, *_MAKES)


class Keyed(TorchDispatchMode):
    """Replaces random operators; `uniform` and `normal` are the next draw under the key.

    `position` says which of the keys is used, `draws` how often it was.
    """

    def __init__(self, keys: Tensor, position: int = 0) -> None:
        super().__init__()
        self.keys = keys
        self.position = position
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_random(func, args, kwargs):
            return func(*args, **kwargs)
        given = bound_arguments(func, args, kwargs)
        if not has_keyed_form(func) or given.get("generator") is not None:
            raise TraceError(
                f"{func} draws random numbers in a way that cannot be keyed",
                legal="dropout, bernoulli, rand, randn, randint, randperm, multinomial, ...",
            )
        name = func._schema.name.removeprefix("aten::")
        if name in _FILLS:
            target = given["self"]
            target.copy_(_FILLS[name](self, target.shape, _floating(target.dtype), given))
            return target
        return _MAKES[name](self, given)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_complex:
            raise TraceError("complex random numbers are not supported", legal="two real tensors")
        self.draws += 1
        return keyed_uniform(self.keys, self.position, self.draws - 1, list(shape), dtype)

    def exponential(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return -torch.log1p(-self.uniform(shape, _exact(dtype))).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Box and Muller's method."""
        exact = _exact(dtype)
        radius = (2.0 * self.exponential(shape, exact)).sqrt()
        return (radius * torch.cos(2.0 * math.pi * self.uniform(shape, exact))).to(dtype)

    def mask(self, shape: Sequence[int], p: float | Tensor) -> Tensor:
        """True with probability p: the same whatever the dtype of the model."""
        return self.uniform(shape, torch.float32) < p

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        return (self.uniform(shape, torch.float64) * (high - low)).long() + low


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Where to compute: few digits have short tails."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.float32


# Operators that overwrite their first argument with numbers of a distribution.


def _fill_uniform(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    low, high = given["from"], given["to"]
    return keyed.uniform(shape, dtype) * (high - low) + low


def _fill_normal(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    return keyed.normal(shape, dtype) * given["std"] + given["mean"]


def _fill_log_normal(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    return _fill_normal(keyed, shape, dtype, given).exp()


def _fill_exponential(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    # As torch's, never 0: code divides by it, or takes its logarithm.
    return keyed.exponential(shape, dtype).clamp(min=torch.finfo(dtype).tiny) / given["lambd"]


def _fill_bernoulli(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    return keyed.mask(shape, given["p"])


def _fill_cauchy(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    turn = math.pi * (keyed.uniform(shape, dtype) - 0.5)
    return torch.tan(turn) * given["sigma"] + given["median"]


def _fill_geometric(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    if given["p"] == 1:
        return torch.ones(shape, dtype=dtype, device=keyed.keys.device)
    trials = keyed.exponential(shape, torch.float32) / -math.log1p(-given["p"])
    return trials.ceil().clamp(min=1)


def _fill_random(keyed: Keyed, shape: Any, dtype: torch.dtype, given: Given) -> Tensor:
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        raise TraceError("random_() without a bound is not supported", legal="random_(low, high)")
    return keyed.integers(shape, low, high)


_FILLS: dict[str, Callable[[Keyed, Any, torch.dtype, Given], Tensor]] = {
    "uniform_": _fill_uniform,
    "normal_": _fill_normal,
    "log_normal_": _fill_log_normal,
    "exponential_": _fill_exponential,
    "bernoulli_": _fill_bernoulli,
    "cauchy_": _fill_cauchy,
    "geometric_": _fill_geometric,
    "random_": _fill_random,
}


# Operators that return new tensors.


def _like(given: Given, made: Tensor) -> Tensor:
    """`made` in the memory format that the operator would give it."""
    like, wanted = given["self"], given.get("memory_format")
    if like.is_contiguous() and wanted in (None, torch.preserve_format, torch.contiguous_format):
        return made
    empty = torch.empty_like(like, dtype=made.dtype, memory_format=wanted or torch.preserve_format)
    return empty.copy_(made)


def _dtype(given: Given) -> torch.dtype:
    default = given["self"].dtype if "self" in given else torch.get_default_dtype()
    return _told(given, default)


def _told(given: Given, default: torch.dtype) -> torch.dtype:
    """The `dtype` argument; where a schema has a default of its own, it is a number."""
    dtype = given.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else default


def _bernoulli(keyed: Keyed, given: Given) -> Tensor:
    like: Tensor = given["self"]
    probability: float | Tensor = given.get("p", like)
    return keyed.mask(like.shape, probability).to(like.dtype)


def _rand(keyed: Keyed, given: Given) -> Tensor:
    return keyed.uniform(given["size"], _dtype(given))


def _rand_like(keyed: Keyed, given: Given) -> Tensor:
    return _like(given, keyed.uniform(given["self"].shape, _dtype(given)))


def _randn(keyed: Keyed, given: Given) -> Tensor:
    return keyed.normal(given["size"], _dtype(given))


def _randn_like(keyed: Keyed, given: Given) -> Tensor:
    return _like(given, keyed.normal(given["self"].shape, _dtype(given)))


def _normal(keyed: Keyed, given: Given) -> Tensor:
    mean, std, size = given["mean"], given["std"], given.get("size")
    if size is not None:
        return keyed.normal(size, _dtype(given)) * std + mean
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return keyed.normal(shape, tensors[0].dtype) * std + mean


def _randint(keyed: Keyed, given: Given) -> Tensor:
    made = keyed.integers(given["size"], given.get("low", 0), given["high"])
    return made.to(_told(given, torch.int64))


def _randint_like(keyed: Keyed, given: Given) -> Tensor:
    made = keyed.integers(given["self"].shape, given.get("low", 0), given["high"])
    return _like(given, made.to(_dtype(given)))


def _randperm(keyed: Keyed, given: Given) -> Tensor:
    order = torch.argsort(keyed.uniform([given["n"]], torch.float64), stable=True)
    return order.to(_told(given, torch.int64))


def _multinomial(keyed: Keyed, given: Given) -> Tensor:
    weights, num = given["self"].double(), given["num_samples"]
    if given["replacement"]:
        total = weights.cumsum(-1)
        at = keyed.uniform((*weights.shape[:-1], num), torch.float64)
        found = torch.searchsorted(total / total[..., -1:], at, right=True)
        return found.clamp(max=weights.shape[-1] - 1)
    # The category whose exponential clock rings first is drawn with its weight; then the second one.
    clocks = keyed.exponential(weights.shape, torch.float64).clamp(min=1e-300)
    return (weights / clocks).topk(num).indices


def _native_dropout(keyed: Keyed, given: Given) -> tuple[Tensor, Tensor]:
    x, p = given["input"], given["p"]
    mask = keyed.mask(x.shape, 1.0 - p)
    return x * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _rrelu_with_noise(keyed: Keyed, given: Given) -> Tensor:
    x, lower, upper = given["self"], given["lower"], given["upper"]
    slope = keyed.uniform(x.shape, x.dtype) * (upper - lower) + lower
    noise = torch.where(x <= 0, slope, torch.ones_like(slope))
    given["noise"].copy_(noise)
    return x * noise


_MAKES: dict[str, Callable[[Keyed, Given], Any]] = {
    "bernoulli": _bernoulli,
    "rand": _rand,
    "rand_like": _rand_like,
    "randn": _randn,
    "randn_like": _randn_like,
    "normal": _normal,
    "randint": _randint,
    "randint_like": _randint_like,
    "randperm": _randperm,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu_with_noise,
}
