"""Casts: what torch.autocast does around captured code, as a fact of each node.

A cut can then fall anywhere. Whoever runs the code, on fake tensors or in a trace of AOTAutograd, runs
each node under its own casts, so that the casts become part of what is traced, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from piper.bodies.leaves import tensors_in

CASTS = "piper_casts"  # in a node's meta: its Casts
CAST_WEIGHTS = "piper_cast_weights"  # which of its inputs are weights that it casts, and to what
_CASTING_METHODS = ("to", "type", "type_as", "bfloat16", "half")  # the user's own casts


@dataclass(frozen=True)
class DeviceCasts:
    """What autocast does to the tensors of one kind of device."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Casts:
    """The autocasts around a node. `context` numbers the outermost one. In each, a weight is `cached`:
    it is cast once, so that gradients of all its uses are added in the lower precision."""

    devices: tuple[DeviceCasts, ...]
    cached: bool
    context: int

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While a node runs. Torch's own context would turn CUDA's casts off on a machine without it."""
        before = [(casts.device, _state(casts.device)) for casts in self.devices]
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # its keys are leaves; in a trace there are none
        try:
            for casts in self.devices:
                _set(casts.device, (casts.enabled, casts.dtype))
            yield
        finally:
            for device, state in before:
                _set(device, state)
            torch.set_autocast_cache_enabled(caching)


def _state(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set(device: str, state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, state[0])
    torch.set_autocast_dtype(device, state[1])


@contextlib.contextmanager
def casting(node: fx.Node) -> Iterator[None]:
    """Under a node's casts, if it has any."""
    casts: Casts | None = node.meta.get(CASTS)
    with casts.active() if casts is not None else contextlib.nullcontext():
        yield


class CapturedRun(fx.Interpreter):
    """Runs captured code, each node under its casts. In one autocast a weight is cast once."""

    context: int | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.weights: dict[tuple[fx.Node, torch.dtype], Tensor] = {}
        try:
            return super().run(*args, **kwargs)
        finally:
            self.weights = {}

    def run_node(self, n: fx.Node) -> Any:
        casts: Casts | None = n.meta.get(CASTS)
        if casts is not None and casts.context != self.context:
            self.context = casts.context
            self.weights = {}
        with casting(n):
            return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        known: dict[int, torch.dtype] = n.meta.get(CAST_WEIGHTS, {})
        dtypes = {n.all_input_nodes[at]: dtype for at, dtype in known.items()}

        def value(arg: fx.Node) -> Any:
            if arg not in dtypes:
                return self.env[arg]
            key = arg, dtypes[arg]
            if key not in self.weights:
                self.weights[key] = self.env[arg].to(dtypes[arg])
            return self.weights[key]

        return fx.map_arg(args, value)


class CastWatch(TorchDispatchMode):
    """Notes which weights the calls under it cast to another dtype, without any other use of them."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = list(weights)
        self.dtypes: dict[int, set[Any]] = {}  # by id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            if tensors_in(result) and any(tensor is weight for weight in self.weights):
                cast = func is torch.ops.aten._to_copy.default
                self.dtypes.setdefault(id(tensor), set()).add(kwargs.get("dtype") if cast else None)
        return result  # no tensor where a fake one is asked for its device

    def cast_to(self, tensor: Tensor) -> torch.dtype | None:
        found = self.dtypes.get(id(tensor), set())
        return next(iter(found)) if len(found) == 1 else None


@contextlib.contextmanager
def noting_cast_weights(node: fx.Node, given: Mapping[fx.Node, Any]) -> Iterator[None]:
    """While a node runs on what is `given`: the weights among it that torch's autocast would cache."""
    casts: Casts | None = node.meta.get(CASTS)
    inputs = enumerate(node.all_input_nodes)
    weights = {at: given[arg] for at, arg in inputs if _is_weight(arg, given[arg])}
    if casts is None or not casts.cached or not weights or node.target in _CASTING_METHODS:
        yield
        return
    with CastWatch(weights.values()) as watch:
        yield
    dtypes = {at: dtype for at, weight in weights.items() if (dtype := watch.cast_to(weight))}
    if dtypes:
        node.meta.setdefault(CAST_WEIGHTS, dtypes)


def _is_weight(node: fx.Node, value: Any) -> bool:
    if node.op != "placeholder" or not isinstance(value, Tensor):
        return False
    return value.requires_grad and value.dtype == torch.float32


def casts_words(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Casts as part of the identity of code, up to the numbers of contexts."""
    numbers: dict[int, int] = {}
    words = {}
    for node in nodes:
        casts: Casts | None = node.meta.get(CASTS)
        if casts is not None:
            number = numbers.setdefault(casts.context, len(numbers))
            words[node] = f"casts {number} {casts.devices} {node.meta.get(CAST_WEIGHTS)}"
    return words
