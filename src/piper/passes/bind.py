"""bind: chunks get their real code, and exactly the Values that the code reads and writes.

In: the complete logical graph and the bodies of each chunk. Out: a draft whose chunks read parameters,
batch leaves and saved Values of their own slice; sharded chunks have their exchanges around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.ir.routing import ExpertForm, expert_form
from piper.ir.values import Role, Value
from piper.passes.draft import Draft, at_slice
from piper.passes.route import Route
from piper.passes.tangents import sum_tangent
from piper.plan.body_spec import ChunkBodies, TensorSpec

GetBodies = Callable[[Chunk, ExpertForm | None, int], ChunkBodies]
_GIVEN = ("param", "buffer", "batch", "key", "constant")


@dataclass
class _Forward:
    """What a backward needs to know of its forward."""

    inputs: list[str]
    outputs: list[str]  # as the body wrote them
    results: list[str]  # as other chunks see them
    saved: list[str]
    bodies: ChunkBodies
    route: Route | None
    kept: list[str]  # what BI gives to BW
    gradients: dict[str, str]  # of what -> the Value of that contribution
    receiver: Chunk | None = None  # the B or BI at which gradients of the outputs arrive
    tangents: dict[int, str] = field(default_factory=dict)


def bind_bodies(logical: Graph, bodies: GetBodies, specs: Mapping[str, TensorSpec]) -> Draft:
    binder = _Binder(logical, bodies, specs)
    for node in logical.chunks:
        if node.phase == "F":
            binder.forward(node)
    for node in logical.chunks:
        if node.phase != "F":
            binder.announce(node)
    for node in logical.chunks:
        if node.phase != "F":
            binder.backward(node)
    return binder.draft


class _Binder:
    def __init__(self, logical: Graph, bodies: GetBodies, specs: Mapping[str, TensorSpec]) -> None:
        self.logical = logical
        self.bodies = bodies
        self.specs = specs
        self.draft = Draft(logical)
        self.done: dict[str, _Forward] = {}
        self.forms: dict[int, ExpertForm | None] = {}

    def forward(self, node: Chunk) -> None:
        route = self._route(node)
        found = self.bodies(node, route.form if route else None, route.size if route else 1)
        names = [name for name in node.outputs if self.logical.values[name].role != "saved"]
        inputs = [self._input(node, name, route) for name in node.inputs]
        if route:
            inputs = route.dispatch(self.draft, inputs)
        outputs = [
            self._made(node, name, spec, route)
            for name, spec in zip(names, found.outputs, strict=True)
        ]
        saved = []
        for index, spec in enumerate(found.saved):
            name = f"$saved.{index}.{node.name}"
            saved.append(self.draft.value(self._value(name, "saved", spec, node, route)))
        table = {"input": inputs, "output": outputs, "saved": saved}
        body = found.by_phase["F"]
        self.draft.node(
            msgspec.structs.replace(
                node,
                body=body.hash,
                inputs=tuple(table[ref.kind][ref.index] for ref in body.inputs),
                outputs=tuple(table[ref.kind][ref.index] for ref in body.outputs),
            )
        )
        if route:
            for local, name in zip(outputs, names, strict=True):
                plain = msgspec.structs.replace(self.draft.values[local], name=name, bound=None)
                route.give_back(self.draft, local, plain, chunk=node)
        kept = [f"$kept.{index}.{node.name}" for index in range(len(found.kept))]
        self.done[node.name] = _Forward(inputs, outputs, names, saved, found, route, kept, {})

    def announce(self, node: Chunk) -> None:
        """Note which gradients a backward, or a half of one, stands for."""
        forward = self.done[node.forward]
        forward.gradients |= {self.logical.values[name].of: name for name in node.outputs}
        if node.phase != "BW":
            forward.receiver = node

    def backward(self, node: Chunk) -> None:
        forward = self.done[node.forward]
        body = forward.bodies.by_phase.get(node.phase)
        if body is None:
            return  # a first stage has no BI, a stage without parameters no BW
        route = forward.route
        for ref in body.inputs:
            if ref.kind == "tangent" and ref.index not in forward.tangents:
                forward.tangents[ref.index] = self._received(forward, ref.index)
        table: dict[str, Mapping[int, str]] = {
            "input": dict(enumerate(forward.inputs)),
            "output": dict(enumerate(forward.outputs)),
            "saved": dict(enumerate(forward.saved)),
            "kept": dict(enumerate(forward.kept)),
            "tangent": forward.tangents,
        }
        traced = self.logical.nodes[node.forward].inputs
        outputs = []
        back: list[tuple[str, Value]] = []
        for ref in body.outputs:
            if ref.kind == "kept":
                name, spec = forward.kept[ref.index], forward.bodies.kept[ref.index]
                outputs.append(self.draft.value(self._value(name, "saved", spec, node, route)))
                continue
            name = forward.gradients[traced[ref.index]]
            value = self.logical.values[name]
            spec = forward.bodies.grads[ref.index]
            made = self._value(name, value.role, spec, node, route, of=value.of)
            if route and ref.index in route.form.rows:
                local = self.draft.like(made, f"{name}~local", node.slice)
                outputs.append(local)
                back.append((local, msgspec.structs.replace(made, bound=None)))
            else:
                outputs.append(self.draft.value(made))
        self.draft.node(
            msgspec.structs.replace(
                node,
                body=body.hash,
                inputs=tuple(table[ref.kind][ref.index] for ref in body.inputs),
                outputs=tuple(outputs),
            )
        )
        for local, plain in back:
            assert route is not None
            route.give_back(self.draft, local, plain, chunk=node)

    def _received(self, forward: _Forward, index: int) -> str:
        """The gradient of an output, where the backward needs it."""
        node = forward.receiver
        assert node is not None
        name = self._tangent(node, forward.results[index])
        if forward.route:
            [name] = forward.route.send_rows(self.draft, [name], node, f"t{index}")
        return name

    def _route(self, node: Chunk) -> Route | None:
        axes = tuple(owner.axis for owner in node.owners if owner.how == "shard")
        size = self.logical.mesh.size_of(axes)
        if size == 1:
            return None
        if node.chunk not in self.forms:
            self.forms[node.chunk], _ = expert_form(self.logical, node)
        form = self.forms[node.chunk]
        assert form is not None
        return Route(node, form, axes, size)

    def _input(self, node: Chunk, name: str, route: Route | None) -> str:
        """A chunk's input; what is given to a rank is a Value of the chunk's own slice."""
        value = self.logical.values[name]
        if value.role not in _GIVEN:
            return name
        spec = self.specs[_base(name)]
        shape = spec.shape
        if route and value.role == "param":
            shape = (shape[0] // route.size, *shape[1:])
        local = msgspec.structs.replace(
            value,
            name=at_slice(name, node.slice),
            shape=shape,
            dtype=spec.dtype,
            slice=node.slice,
            of=name,
        )
        return self.draft.value(local)

    def _made(self, node: Chunk, name: str, spec: TensorSpec, route: Route | None) -> str:
        role = self.logical.values[name].role
        value = self._value(name if not route else f"{name}~local", role, spec, node, route)
        return self.draft.value(value)

    def _value(
        self,
        name: str,
        role: Role,
        spec: TensorSpec,
        node: Chunk,
        route: Route | None,
        *,
        of: str = "",
    ) -> Value:
        bound = spec.shape[0] * route.size if route and spec.dynamic else None
        layout = self.logical.values[name].layout if name in self.logical.values else ()
        return Value(
            name,
            role,
            spec.shape,
            spec.dtype,
            layout,
            of=of,
            bound=bound,
            slice=node.slice,
        )

    def _tangent(self, node: Chunk, output: str) -> str:
        """The gradient of an output: the seed, the one contribution, or the sum of several."""
        found = []
        for name in node.inputs:
            value = self.logical.values[name]
            if value.role == "constant" and output == self._loss_of(node):
                found.append(self._seed(node, value))
            elif value.role == "grad" and value.of == output:
                found.append(name)
        return sum_tangent(self.draft, node, output, found)

    def _loss_of(self, node: Chunk) -> str:
        return next(
            (n for n in self.done[node.forward].results if _base(n) == self.logical.loss), ""
        )

    def _seed(self, node: Chunk, value: Value) -> str:
        name = at_slice(value.name, node.slice)
        return self.draft.like(value, name, node.slice, of="1")


def _base(name: str) -> str:
    return name.partition("[")[0]
