"""Bodies through Inductor: the text of a body and how its inputs lie in, a faster function out.

A body is traced on fake inputs with Inductor's decompositions and compiled as it stands: there is no
Dynamo, and so nothing to guard, in a call. It keeps what the eager body promises: inputs are read only,
outputs lie as the eager ones do and share no memory that those do not share, operators of our own and
attention kernels stay calls of the kernel that the body names.

Rows whose number depends on the data are one symbol between 2 and their bound. Compilers assume that a
symbolic size is neither 0 nor 1, so that a call with fewer than 2 rows runs the eager body.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from piper.bodies.files.codec import Function, content_hash, decode, load
from piper.bodies.inductor.disk import cache_folder, lock
from piper.bodies.products import Added

Strides = tuple[int, ...] | None
T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """An input of a body. With `bound`, dim 0 depends on the data and is at most so large.

    `strides` None: the tensor is contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    bound: int | None = None
    strides: Strides = None


@dataclass
class _Graph:
    """A traced body: what Inductor compiles, and the tensors it was traced with.

    The constants of the body are its last inputs; it changes none but its sums.
    """

    module: fx.GraphModule
    inputs: list[Tensor]
    constants: list[Tensor]
    mode: FakeTensorMode
    sums: frozenset[int]  # inputs that it adds to
    empty: tuple[int, ...]  # results that the body leaves out, and Inductor does not know of


@dataclass(eq=False)
class Body:
    """A body for given inputs. `function` is eager until `compile_bodies` has seen it.

    `strides` says how each result lies: None is contiguous; all is None where that is not known.
    `problem` is why it stays eager.
    """

    name: str
    key: str
    function: Function
    strides: tuple[Strides, ...] | None = None
    rows: tuple[int, ...] = ()  # inputs whose number of rows must be looked at before a call
    problem: str = ""
    warned: bool = False
    graph: _Graph | None = field(default=None, repr=False)


@lru_cache(maxsize=1024)
def trace_body(text: str, inputs: tuple[Given, ...], device: str, added: Added = ()) -> Body:
    """Trace a body on fake inputs; equal ones are one object in a process. It adds the results that are
    `added` to its last inputs."""
    place = str(torch.empty(0, device=device).device)  # "cuda" is the current one
    found = repr((text, added, inputs, place, torch.__version__))
    key = hashlib.sha256(found.encode()).hexdigest()[:32]
    body = Body(content_hash(text), key, load(text, added))
    sizes = [given.shape[0] if given.bound is not None else -1 for given in inputs]
    body.rows = tuple(i for i, n in enumerate(sizes) if n >= 0 and n not in sizes[:i])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body.graph = _trace(text, added, inputs, device)
    except Exception as error:  # whatever it is: the eager body still runs
        body.problem = _first_line(error)
    else:
        strides = map(_strides, _results(body.graph.module))
        body.strides = tuple(_with_empty(strides, body.graph.empty))
    return body


@lru_cache(maxsize=1024)
def eager_body(text: str, why: str, added: Added = ()) -> Body:
    """A body that is not compiled; how its results lie depends on what it is given."""
    return Body(content_hash(text), "", load(text, added), problem=why)


def compile_bodies(bodies: Mapping[Body, str]) -> None:
    """Give bodies their compiled functions; those that have none stay eager, with a warning each.

    `bodies` has the name of a task that runs it for each. A body that another process compiles now
    comes last, when its result lies in the cache on disk.
    """
    left = [body for body in bodies if body.graph is not None]
    for wait in (False, True):
        for body in list(left):
            with lock(body.key, wait=wait) as mine:
                if mine:
                    _compile(body)
                    left.remove(body)
    for body, task in bodies.items():
        if body.problem and not body.warned:
            body.warned = True
            warnings.warn(
                f"body {body.name} of {task} runs eagerly: {body.problem}",
                RuntimeWarning,
                stacklevel=2,
            )


def _trace(text: str, added: Added, inputs: tuple[Given, ...], device: str) -> _Graph:
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows: dict[int, Any] = {}
    made = []
    for given in inputs:
        shape: tuple[Any, ...] = given.shape
        if given.bound is not None:
            if shape[0] not in rows:
                rows[shape[0]] = _rows(mode, shape[0], given.bound, len(rows))
            shape = (rows[shape[0]], *shape[1:])
        with mode:
            dtype = getattr(torch, given.dtype)
            if given.strides is None:
                made.append(torch.empty(shape, dtype=dtype, device=device))
            else:
                made.append(torch.empty_strided(shape, given.strides, dtype=dtype, device=device))
    function, constants = _constants_as_inputs(decode(text, added))
    made += [mode.from_tensor(constant, static_shapes=True) for constant in constants]
    # Attention that is decomposed would need memory for all its weights.
    table = {o: f for o, f in select_decomp_table().items() if "scaled_dot_product" not in str(o)}
    with mode, torch.no_grad():
        module = make_fx(function, decomposition_table=table)(*made)
    end = module.graph.output_node()
    results: Any = end.args[0]
    empty = tuple(i for i, result in enumerate(results) if result is None)
    end.args = (tuple(result for result in results if result is not None),)
    module.recompile()
    sums = range(len(inputs) - len(added), len(inputs))
    return _Graph(module, made, constants, mode, frozenset(sums), empty)


def _constants_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    constants = []
    last = module.graph.find_nodes(op="placeholder")[-1:]
    for node in module.graph.find_nodes(op="get_attr"):
        constants.append(getattr(module, str(node.target)))
        point = last[0] if last else next(iter(module.graph.nodes)).prev
        with module.graph.inserting_after(point):
            last = [module.graph.placeholder(str(node.target))]
        node.replace_all_uses_with(last[0])
        module.graph.erase_node(node)
    return fx.GraphModule(module, module.graph), constants


def _rows(mode: FakeTensorMode, expected: int, bound: int, number: int) -> Any:
    """A symbolic size; its name must be equal in all processes, for Inductor's cache."""
    from torch._dynamo.source import ConstantSource

    size: Any = mode.from_tensor(
        torch.empty(max(expected, 2)),
        source=ConstantSource(f"rows{number}"),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
    ).shape[0]
    assert mode.shape_env is not None
    mode.shape_env.constrain_symbol_range(size.node.expr, 2, max(bound, expected, 2))
    return size


def _results(module: fx.GraphModule) -> list[Any]:
    (results,) = next(iter(reversed(module.graph.nodes))).args
    return [node.meta["val"] for node in results]


def _with_empty(results: Iterable[T], empty: Iterable[int]) -> list[T | None]:
    found: list[T | None] = list(results)
    for place in empty:
        found.insert(place, None)
    return found


def _strides(value: Tensor) -> Strides:
    return None if value.is_contiguous() else tuple(value.stride())


def _compile(body: Body) -> None:
    """Replace a body's function by what Inductor makes of its graph, or note why not."""
    graph, body.graph = body.graph, None
    assert graph is not None
    if any(not isinstance(n, int) for strides in body.strides or () for n in strides or ()):
        body.strides, body.problem = None, "strides of a result depend on the number of rows"
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = _inductor(graph)
    except Exception as error:  # whatever it is: the eager body still runs
        body.problem = _first_line(error)
        return
    shapes = graph.mode.shape_env
    assert shapes is not None
    if shapes.guards or shapes.replacements:
        rule = str(shapes.guards[0].expr) if shapes.guards else str(shapes.replacements)
        body.problem = f"the code that Inductor makes holds only if {rule}"
        return
    body.function = _function(compiled, graph, body)


def _inductor(graph: _Graph) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config

    output = next(iter(reversed(graph.module.graph.nodes)))
    # The strides of these results are kept as they were traced.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    assert graph.mode.shape_env is not None
    ranges = [str(r) for r in graph.mode.shape_env.var_to_range.values()]
    with (
        cache_folder(),
        config.patch(_SETTINGS),
        torch.compiler.config.patch(  # type: ignore[attr-defined]
            cache_key_tag=f"piper {ranges}"
        ),  # a symbol's name has no range
        tracing(TracingContext(graph.mode)),
        torch.no_grad(),
    ):
        compiled: Any = compile_fx.compile_fx_inner(graph.module, graph.inputs)
    changed = set(getattr(compiled, "mutated_input_idxs", ())) - graph.sums
    if changed:
        raise AssertionError(f"it would change its inputs {sorted(changed)}")
    return getattr(compiled, "current_callable", None) or compiled


_SETTINGS = {
    "compile_threads": 1,  # no pool of processes that would outlive a worker
    "fx_graph_cache": True,
    "triton.cudagraphs": False,  # results would lie in memory that the next call overwrites
    "freezing": False,
}


def _function(
    compiled: Callable[[list[Tensor]], Sequence[Tensor]], graph: _Graph, body: Body
) -> Function:
    eager, rows, constants, empty = body.function, body.rows, graph.constants, graph.empty

    def call(inputs: list[Tensor]) -> Sequence[Any]:
        inputs += constants
        return compiled(inputs)

    def call_with_empty(inputs: list[Tensor]) -> Sequence[Any]:
        return _with_empty(call(inputs), empty)

    made = call_with_empty if empty else call

    def call_with_rows(inputs: list[Tensor]) -> Sequence[Any]:
        for i in rows:
            if inputs[i].shape[0] < 2:
                return eager(inputs)
        return made(inputs)

    return call_with_rows if rows else made


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    logging.getLogger(__name__).debug("Inductor", exc_info=error)
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
