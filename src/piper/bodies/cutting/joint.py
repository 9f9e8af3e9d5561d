"""AOTAutograd of one chunk: ChunkCode in, the joint graph of forward and backward out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from piper.bodies.checkpoint_regions import CheckpointedRun
from piper.bodies.chunk_code import ChunkCode, dtype_name
from piper.bodies.cutting.linalg_checks import unordered_checks
from piper.bodies.cutting.rnn_dropout import dropout_between_layers
from piper.bodies.operators import draws_random
from piper.errors import TraceError

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Joint:
    """Placeholders: the inputs, then the tangents. Results: the outputs, then a gradient or None per
    input."""

    graph: fx.Graph
    module: fx.GraphModule
    num_outputs: int


def trace_joint(code: ChunkCode, *, device: str, run: Run | None = None) -> Joint:
    """Trace `code` (or `run`, a function around it) forward and backward on fake tensors.

    Every output leaves contiguous and shares memory with nothing; an output that receives no
    gradient leaves detached.
    """
    run = run or runner(code, device=device)
    with warnings.catch_warnings(), dropout_between_layers(), unordered_checks():
        warnings.simplefilter("ignore")
        fixes = _boundary_fixes(code, run, device)

        def bounded(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                fix(out) for fix, out in zip(fixes, run(*inputs), strict=True) if out is not None
            )

        inputs, mode = fake_inputs(code, device)
        if code.tangents:
            joint = _trace_with_gradient(code, bounded, inputs)
        else:
            with mode:
                joint = _trace_without_gradient(code, bounded, inputs)
    _check_no_specialization(mode)
    _check_no_generator(joint)
    return joint


def runner(code: ChunkCode, *, device: str) -> Run:
    """A function that runs the captured code on `device`: named devices and the default one move."""
    root, graph = on_device(code, device)
    forward = CheckpointedRun(root, graph=graph).run

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.device(device):
            return forward(*inputs)

    return run


def on_device(code: ChunkCode, device: str) -> tuple[torch.nn.Module, fx.Graph]:
    """The code with other devices in its arguments, and a module with its constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(code.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda a: _moved(a, device))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _moved(a, device))
    root = torch.nn.Module()
    for name, constant in code.constants.items():
        root.register_buffer(name, constant.to(device))
    return root, graph


def _moved(arg: Any, device: str) -> Any:
    return torch.device(device) if isinstance(arg, torch.device) else arg


def fake_inputs(code: ChunkCode, device: str) -> tuple[list[Tensor], FakeTensorMode]:
    """Fresh fake tensors for the inputs; inputs with a dynamic dim 0 share one symbol per size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows: dict[int, Any] = {}
    made = []
    for given in code.inputs:
        spec = given.spec
        shape: tuple[Any, ...] = spec.shape
        if spec.bound is not None:
            if spec.shape[0] not in rows:
                rows[spec.shape[0]] = _symbolic_size(mode, spec.shape[0])
            shape = (rows[spec.shape[0]], *spec.shape[1:])
        with mode:
            tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
        made.append(tensor.requires_grad_(given.requires_grad))
    return made, mode


def _symbolic_size(mode: FakeTensorMode, hint: int) -> Any:
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC]
    )
    return mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]


def _boundary_fixes(code: ChunkCode, run: Run, device: str) -> list[Callable[[Tensor], Tensor]]:
    """What each output needs to leave contiguous, alone in its memory, and detached if it may."""
    inputs, mode = fake_inputs(code, device)
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    fixes: list[Callable[[Tensor], Tensor]] = []
    with mode:
        outputs = run(*inputs)
    _check_dtypes(code, outputs, device)
    for index, out in enumerate(outputs):
        storage = out.untyped_storage()._cdata
        if out.is_conj() or out.is_neg():
            fix: Callable[[Tensor], Tensor] = _resolved
        elif not out.is_contiguous():
            fix = _contiguous
        elif storage in seen:
            fix = torch.clone
        else:
            fix = _same
        seen.add(storage)
        fixes.append(fix if index in code.tangents else _detached(fix))
    return fixes


def _check_dtypes(code: ChunkCode, outputs: Sequence[Tensor], device: str) -> None:
    for out, spec in zip(outputs, code.outputs, strict=True):
        if (made := dtype_name(out.dtype)) != spec.dtype:
            raise TraceError(
                f"code gives {made} on {device} where its trace gave {spec.dtype}",
                legal="dtypes that do not depend on the device; for autocast, lower(precision='bf16')",
            )


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _resolved(tensor: Tensor) -> Tensor:
    return _contiguous(tensor.resolve_conj().resolve_neg())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _detached(fix: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: fix(tensor.detach())


def _trace_with_gradient(code: ChunkCode, run: Run, inputs: list[Tensor]) -> Joint:
    class Bounded(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return run(*inputs)

    with contextlib.ExitStack() as stack:
        found = aot_export_joint_with_descriptors(stack, Bounded(), tuple(inputs))
        module = found.graph_module
    results = next(iter(reversed(module.graph.nodes))).meta["desc"]
    if any(type(result).__name__ == "InputMutationAOTOutput" for result in results):
        raise _mutation()
    tangents = sum(n.name.startswith("tangents") for n in module.graph.nodes)
    if tangents != len(code.tangents):
        raise AssertionError(f"{tangents} tangents for {len(code.tangents)} differentiable outputs")
    return Joint(module.graph, module, len(code.outputs))


def _trace_without_gradient(code: ChunkCode, run: Run, inputs: list[Tensor]) -> Joint:
    with torch.no_grad():
        # First without functionalize, under which random operations would not find their keys.
        plain = make_fx(run)(*inputs)
        functional = torch.func.functionalize(lambda *args: plain(*args), remove="mutations")
        module = make_fx(functional)(*inputs)
    if any(node.target is torch.ops.aten.copy_.default for node in module.graph.nodes):
        raise _mutation()
    return Joint(module.graph, module, len(code.outputs))


def _mutation() -> TraceError:
    return TraceError(
        "an input of the chunk is changed in place",
        legal="write the result to a new tensor: x = x + y instead of x += y",
    )


def _check_no_specialization(mode: FakeTensorMode) -> None:
    shapes = mode.shape_env
    assert shapes is not None
    if shapes.guards or shapes.replacements:
        rule = str(shapes.guards[0].expr) if shapes.guards else str(shapes.replacements)
        raise TraceError(
            "the code fixes the number of rows",
            details=[f"it holds only if {rule}"],
            legal="use -1 or x.shape[0] only through operators that keep rows apart",
        )


def _check_no_generator(joint: Joint) -> None:
    """Only keyed numbers are the same under every strategy; kernels of a device may have their own."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and draws_random(node.target, node.args, node.kwargs):
            raise TraceError(
                f"{node.target} draws random numbers in a way that cannot be keyed",
                legal="the same operation made of dropout, bernoulli, rand and the like",
            )
