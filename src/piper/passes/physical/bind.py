"""bind: chunks get their real code, and exactly the Values that the code reads and writes.

In: the complete logical graph and the bodies of each chunk. Out: a draft whose chunks read parameters,
batch leaves and saved Values of their own slice, each in the layout that they are made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph
from piper.ir.layouts import Layouts, as_routed, change_between, dual, in_dims_of, local
from piper.ir.nodes import Chunk
from piper.ir.routing import ExpertForm, expert_form
from piper.ir.tensor_type import TensorType
from piper.ir.values import GIVEN, Value, plain_layout, read_along
from piper.passes.physical.bound import BoundForward, traced_layouts
from piper.passes.physical.computed_again import ComputedAgain
from piper.passes.physical.draft import Draft, at_slice
from piper.passes.physical.fold_state import StateChain
from piper.passes.physical.relayouts import Relayouts
from piper.passes.physical.route import Route, routed_form
from piper.passes.physical.tangents import sum_tangent
from piper.passes.physical.weight_halves import hold_weights
from piper.plan.body_spec import ChunkBodies

GetBodies = Callable[[Chunk, ExpertForm | None, int], ChunkBodies]


def bind_bodies(logical: Graph, bodies: GetBodies, lanes: int = 1, device: str = "cpu") -> Draft:
    binder = _Binder(bodies, Draft(logical, lanes, device))
    # Buffers change from microbatch to microbatch.
    for node in sorted(logical.chunks, key=logical.microbatch):
        if node.phase == "F":
            binder.forward(node)
    for node in logical.chunks:
        if node.phase != "F":
            binder.announce(node)
    for node in logical.chunks:
        if node.phase != "F":
            binder.again.before(node)
            binder.backward(node)
    binder.again.hold()
    hold_weights(binder.draft)
    return binder.draft


class _Binder:
    def __init__(self, bodies: GetBodies, draft: Draft) -> None:
        self.logical = draft.logical
        self.bodies = bodies
        self.draft = draft
        self.done: dict[str, BoundForward] = {}
        self.state = StateChain(self.draft)
        self.relayouts = Relayouts(self.draft)
        self.again = ComputedAgain(self.draft, self.relayouts, self._saving, self.done)
        self.counts_at: dict[int, int] = {}  # chunk number -> which input has its counts
        self.local = lru_cache(maxsize=None)(self._local)

    def forward(self, node: Chunk) -> None:
        reads = self._reads(node)
        route = self._route(node, reads)
        bodies = self.bodies(node, route.form if route else None, route.size if route else 1)
        names = [name for name in node.outputs if self.logical.values[name].role != "saved"]
        inputs = [self.state.content(self._input(node, name)) for name in node.inputs]
        if route:
            inputs = route.dispatch(self.draft, inputs)
        outputs = [
            self._made(name, spec, node) for name, spec in zip(names, bodies.outputs, strict=True)
        ]
        saved = [
            self._kept(f"$saved.{index}.{node.name}", spec, node)
            for index, spec in enumerate(bodies.saved)
        ]
        table = {"input": inputs, "output": outputs, "saved": saved}
        body = bodies.by_phase["F"]
        self.draft.node(
            msgspec.structs.replace(
                node,
                body=body.hash,
                inputs=tuple(table[ref.kind][ref.index] for ref in body.inputs),
                outputs=tuple(table[ref.kind][ref.index] for ref in body.outputs),
                sees=traced_layouts(self.logical, node, body.inputs),
                makes=traced_layouts(self.logical, node, body.outputs),
            )
        )
        for made, name in zip(outputs, names, strict=True):
            self._give_back(made, name, node, route)
        if "S" in bodies.by_phase:
            self.state.fold(node, bodies.by_phase["S"], inputs, outputs)
        kept = [f"$kept.{index}.{node.name}" for index in range(len(bodies.kept))]
        self.done[node.name] = BoundForward(inputs, outputs, names, saved, bodies, route, kept)

    def _saving(self, node: Chunk) -> ChunkBodies:
        """The bodies of a chunk whose forward saves all that its backward needs."""
        route = self.done[node.name].route
        plain = msgspec.structs.replace(node, recompute="", checkpoint="")
        return self.bodies(plain, route.form if route else None, route.size if route else 1)

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
        for ref in body.inputs:
            if ref.kind == "tangent" and ref.index not in forward.tangents:
                forward.tangents[ref.index] = self._received(forward, ref.index)
        origin = self.logical.nodes[node.forward]
        read = {ref.index for ref in body.inputs if ref.kind == "input"}
        table: dict[str, Mapping[int, str]] = {
            "input": {
                i: self.relayouts.again(node, origin.inputs[i], forward.inputs[i]) for i in read
            },
            "output": dict(enumerate(forward.outputs)),
            "saved": dict(enumerate(forward.saved)),
            "kept": dict(enumerate(forward.kept)),
            "tangent": forward.tangents,
        }
        traced = origin.inputs
        outputs = []
        gradients: list[tuple[str, str]] = []
        for ref in body.outputs:
            if ref.kind == "kept":
                name, spec = forward.kept[ref.index], forward.bodies.kept[ref.index]
                outputs.append(self._kept(name, spec, node))
                continue
            name = forward.gradients[traced[ref.index]]
            outputs.append(self._made(name, forward.bodies.grads[ref.index], node))
            gradients.append((outputs[-1], name))
        self.draft.node(
            msgspec.structs.replace(
                node,
                body=body.hash,
                inputs=tuple(table[ref.kind][ref.index] for ref in body.inputs),
                outputs=tuple(outputs),
                sees=traced_layouts(self.logical, origin, body.inputs),
                makes=traced_layouts(self.logical, origin, body.outputs, forward.gradients),
            )
        )
        for made, name in gradients:
            self._give_back(made, name, node, forward.route)

    # Layouts

    def _reads(self, node: Chunk) -> list[Layouts]:
        """How a forward chunk reads each of its inputs."""
        shares = {owner.axis: owner.shares for owner in node.owners}
        counts = self._counts(node) if "experts" in shares.values() else ""
        values = (self.logical.values[name] for name in node.inputs)
        return [
            tuple((axis, read_along(value, axis, shares[axis], counts)) for axis, _ in value.layout)
            for value in values
        ]

    def _counts(self, node: Chunk) -> str:
        """The counts of a sharded chunk's rows: the same input in every microbatch."""
        if node.chunk not in self.counts_at:
            form, problem = expert_form(self.logical, node)
            if form is None:
                raise PlanError(f"{node.name} cannot be sharded: {problem}")
            self.counts_at[node.chunk] = form.counts
        return node.inputs[self.counts_at[node.chunk]]

    def _route(self, node: Chunk, reads: list[Layouts]) -> Route | None:
        """The exchange of what a chunk reads in another layout than it has between chunks."""
        mesh = self.logical.mesh
        exchanged: list[int] = []
        along: tuple[str, ...] = ()
        for index, (name, read) in enumerate(zip(node.inputs, reads, strict=True)):
            value = self.logical.values[name]
            change, axes = change_between(plain_layout(value), read, mesh)
            if change == "all_to_all":
                exchanged.append(index)
                along = axes
            elif change:
                raise PlanError(
                    f"{node.name} would read {name} by {change} along {', '.join(axes)}"
                )
        if not exchanged:
            return None
        owner = next(owner for owner in node.owners if owner.axis in along)
        values = self.logical.values
        experts = next(values[n].shape[0] for n in node.inputs if values[n].role == "param")
        form = routed_form(reads, node.inputs, exchanged, experts)
        return Route(node, owner, along, form, mesh.size_of(along), tuple(reads))

    def _give_back(self, made: str, name: str, node: Chunk, route: Route | None) -> None:
        """Lay a result out as it lies between chunks, where its body makes it otherwise."""
        if made == name:
            return
        value = self.draft.values[made]
        if route is None or not route.carries(value.layout):
            raise PlanError(f"{node.name} makes {name} in a layout that nobody can read")
        plain = msgspec.structs.replace(
            value,
            name=name,
            type=msgspec.structs.replace(value.type, bound=None),
            layout=plain_layout(self.logical.values[name]),
            cut=self.logical.values[name].cut,
        )
        route.give_back(self.draft, made, plain, chunk=node)

    # Values

    def _input(self, node: Chunk, name: str) -> str:
        """A chunk's input; what is given to a rank is a Value of the chunk's own slice."""
        value = self.logical.values[name]
        if value.source:
            return self.relayouts.read(node, value, self._input(node, value.source))
        if value.role not in GIVEN:
            return name
        given = msgspec.structs.replace(
            value,
            name=at_slice(name, node.slice),
            type=self.local(value.type, value.layout),
            slice=node.slice,
            of=value.of if value.role == "coordinate" else name,
        )
        return self.draft.value(given)

    def _made(self, name: str, spec: TensorType, node: Chunk) -> str:
        """What a body makes of a logical Value, whose type must be that."""
        value = self.logical.values[name]
        type = self.local(value.type, value.layout)
        if type != spec:
            raise PlanError(f"{node.name} makes {name} as {spec}, but the graph says {type}")
        change, _ = change_between(value.layout, plain_layout(value), self.logical.mesh)
        made = msgspec.structs.replace(
            value,
            name=f"{name}~local" if change else name,
            type=type,
            slice=node.slice,
            cut=as_routed(value.cut, value.layout),
        )
        return self.draft.value(made)

    def _kept(self, name: str, spec: TensorType, node: Chunk) -> str:
        """What a body keeps for a later one of the same chunk."""
        return self.draft.value(Value(name, "saved", spec, slice=node.slice))

    def _local(self, type: TensorType, layout: Layouts) -> TensorType:
        return local(type, layout, self.logical.mesh)

    # Gradients of outputs

    def _received(self, forward: BoundForward, index: int) -> str:
        """The gradient of an output, where and as the backward needs it."""
        node = forward.receiver
        assert node is not None
        output = forward.results[index]
        name = self._tangent(node, output)
        read = tuple((axis, dual(layout)) for axis, layout in self.logical.values[output].layout)
        plain = in_dims_of(read, self.draft.values[name].layout, 0)
        change, _ = change_between(plain, read, self.logical.mesh)
        if not change:
            return name
        if forward.route is None or not forward.route.carries(read):
            raise PlanError(f"{node.name} would read the gradient of {output} by {change}")
        label = f"rows0t{index}>{node.name}"
        return forward.route.send_rows(self.draft, name, read, node, label)

    def _tangent(self, node: Chunk, output: str) -> str:
        """The gradient of an output: the seed, the one contribution, or the sum of several."""
        contributions = []
        for name in node.inputs:
            value = self.logical.values[name]
            if value.role == "constant" and output == self._loss_of(node):
                contributions.append(self._seed(node, value))
            elif value.role == "grad" and value.of == output:
                contributions.append(name)
        contributions += self.relayouts.tangents(node, output)
        return sum_tangent(self.draft, node, output, contributions)

    def _loss_of(self, node: Chunk) -> str:
        return next(
            (n for n in self.done[node.forward].results if _base(n) == self.logical.loss), ""
        )

    def _seed(self, node: Chunk, value: Value) -> str:
        name = at_slice(value.name, node.slice)
        return self.draft.like(value, name, node.slice, of="1")


def _base(name: str) -> str:
    return name.partition("[")[0]
