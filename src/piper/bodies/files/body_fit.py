"""Bodies and slots: a plan and the texts of its bodies in; refused unless each call fits its slots.

Bodies run on fake tensors, operator by operator: no memory is taken, and no number grows beyond 64 bits.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from piper.bodies.files.allowed_operators import FUNCTIONS
from piper.bodies.files.codec import INPUT, decode, input_type
from piper.bodies.products import products_of
from piper.errors import PlanError
from piper.plan.slots import Slot
from piper.plan.tasks import Calling
from piper.plan.types import ModelTensor, Plan, RankClass

_INT64 = 2**63
_MOST_BITS = 64  # of an exponent
_ARITHMETIC = {
    f for name, f in FUNCTIONS.items() if not name.endswith((":getitem", ":manual_seed"))
}
# Shapes that only the data decides: what a body makes of them is seen when it runs.
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class _Misfit(Exception):
    """Why a body does not fit."""


def check_bodies(plan: Plan, texts: Mapping[str, str]) -> None:
    """Raise PlanError unless every body can be read and fits where it is called."""
    modules = {name: decode(texts[name]) for name in plan.bodies}
    for name, places in plan.products.items():
        if not set(places) <= set(products_of(modules[name].graph)):
            raise PlanError(f"body {name} has results {list(places)} that are no products")
    fits = _Fits(modules, plan.device)
    for part in plan.classes:
        fits.check(part)
    for name, tensor in plan.tensors.items():
        with _refusing(name, tensor.init):
            _fit_initial(modules[tensor.init], tensor)


@contextlib.contextmanager
def _refusing(caller: str, body: str) -> Iterator[None]:
    """Turns what does not fit into one error that names the body and who calls it."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:  # whatever torch says of shapes and dtypes that do not go together
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PlanError(f"{caller}: body {body} {lines[0][:200]}") from None


Strides = tuple[int, ...] | None  # None: as a new tensor has them


class _Fits:
    """Calls that fit: each is run once, with the strides that the tasks before it leave."""

    def __init__(self, modules: Mapping[str, fx.GraphModule], device: str) -> None:
        self.modules = modules
        self.device = device
        self.left: dict[tuple[Any, ...], tuple[Strides, ...]] = {}  # by call, of its results

    def check(self, part: RankClass) -> None:
        strides: dict[int, Strides] = {}  # of slots as they are by now
        for task in part.tasks:
            if isinstance(task, Calling):
                given = tuple(strides.get(index) for index in task.inputs)
                slots = [part.slots[index] for index in (*task.inputs, *task.outputs)]
                kinds = ((s.shape, s.dtype, s.bound is None) for s in slots)
                call = (task.body, given, *kinds)
                if call not in self.left:
                    with _refusing(f"{part.slice}: {task.name}", task.body):
                        module = self.modules[task.body]
                        self.left[call] = _fit_task(module, part, task, given, self.device)
                strides |= zip(task.outputs, self.left[call], strict=True)
            else:  # a sum lies as what it sums
                alike = {part.slots[index].shape: strides.get(index) for index in task.reads}
                strides |= {index: alike.get(part.slots[index].shape) for index in task.writes}


def _fit_task(
    module: fx.GraphModule,
    part: RankClass,
    task: Calling,
    given: Sequence[Strides],
    device: str,
) -> tuple[Strides, ...]:
    """The strides of what it gives."""
    holders = module.graph.find_nodes(op="placeholder")
    num_inputs = len(holders)
    (results,) = module.graph.output_node().args
    assert isinstance(results, tuple | list)
    if num_inputs != len(task.inputs) or len(results) != len(task.outputs):
        raise _Misfit(
            f"takes {num_inputs} and gives {len(results)} tensors, "
            f"not {len(task.inputs)} and {len(task.outputs)}"
        )
    for holder, index in zip(holders, task.inputs, strict=True):
        slot = part.slots[index]
        if holder.meta.get(INPUT) != input_type(slot.type):
            raise _Misfit(
                f"takes {holder.meta.get(INPUT, 'a number')} for {slot.name}, {slot.type}"
            )
    if device != "cpu" and not torch.cuda.is_available():
        return (None,) * len(results)  # another machine's kernels decide about strides and dtypes
    with FakeTensorMode():
        inputs = [
            _fake(part.slots[index], strides, device)
            for index, strides in zip(task.inputs, given, strict=True)
        ]
    outputs = _run(module, inputs)
    if outputs is None:
        return (None,) * len(results)
    slots = [part.slots[index] for index in task.outputs]
    for slot, value in zip(slots, outputs, strict=True):
        _compare(slot, value)
    return tuple(_strides(slot, value) for slot, value in zip(slots, outputs, strict=True))


def _fit_initial(module: fx.GraphModule, tensor: ModelTensor) -> None:
    num_inputs = len(module.graph.find_nodes(op="placeholder"))
    if num_inputs != len(tensor.keys):
        raise _Misfit(f"takes {num_inputs} seeds, not {len(tensor.keys)}")
    outputs = _run(module, [1] * num_inputs)
    if outputs is not None and [_shape(value) for value in outputs] != [tensor.shape]:
        raise _Misfit(f"does not make one tensor of shape {list(tensor.shape)}")


def _fake(slot: Slot, strides: Strides, device: str) -> Tensor:
    dtype = getattr(torch, slot.dtype)
    if strides is None:
        return torch.empty(slot.shape, dtype=dtype, device=device)
    return torch.empty_strided(slot.shape, strides, dtype=dtype, device=device)


def _strides(slot: Slot, value: Tensor) -> Strides:
    """Rows by the data have those of a new tensor."""
    if slot.bound is not None or value.layout != torch.strided or value.is_contiguous():
        return None
    return tuple(value.stride())


def _compare(slot: Slot, value: Any) -> None:
    start = 0 if slot.bound is None else 1  # rows by the data
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    shape = _shape(value)
    if shape is None or dtype != slot.dtype or shape[start:] != slot.shape[start:]:
        found = f"{dtype}{list(shape)}" if shape is not None else "no tensor"
        raise _Misfit(f"gives {found} for {slot.name}, {slot.dtype}{list(slot.shape)}")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _run(module: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any] | None:
    """What a body gives for these inputs; None if only the data could tell."""
    first = inputs[0] if inputs else None
    mode = first.fake_mode if isinstance(first, FakeTensor) else FakeTensorMode()
    try:
        with warnings.catch_warnings(), mode, torch.no_grad():
            warnings.simplefilter("ignore")
            outputs: Sequence[Any] = _Careful(module, mode).run(*inputs)
            return outputs
    except _UNKNOWN:
        return None


class _Careful(fx.Interpreter):
    """Runs a body that nobody has run yet: Python's arithmetic only on numbers that stay small."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode = mode
        self.extra_traceback = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is FUNCTIONS["torch.random:manual_seed"]:
            return None  # no operator draws numbers here
        if target not in _ARITHMETIC:
            return super().call_function(target, args, kwargs)
        if not all(isinstance(arg, int | float | torch.SymInt | torch.SymFloat) for arg in args):
            raise _Misfit(f"calls {target.__name__} with what is no number")
        if target is FUNCTIONS["_operator:pow"] and not abs(args[1]) <= _MOST_BITS:
            raise _Misfit(f"calls pow with the exponent {args[1]}")
        value = super().call_function(target, args, kwargs)
        if isinstance(value, int) and abs(value) >= _INT64:
            raise _Misfit("counts beyond 64 bits")
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.mode.from_tensor(super().get_attr(target, args, kwargs))
