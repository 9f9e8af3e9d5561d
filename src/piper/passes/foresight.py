"""foresight: the complete logical graph in; for each chunk, what bodies would read and write, out.

Nothing is traced. A backward is taken to read all parameters of its forward, and a BW none, so that
gathers of parameters are foreseen at their most; and to read again what was gathered of cut Values.
One that computes all again is taken to read all inputs, so that this, too, is foreseen at its most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from piper.ir.graph import Graph
from piper.ir.layouts import SHARED, Split, local
from piper.ir.nodes import Chunk
from piper.ir.routing import ExpertForm
from piper.ir.tensor_type import TensorType
from piper.passes.physical.bind import GetBodies
from piper.plan.body_spec import BodySpec, ChunkBodies, Ref, RefKind


def foreseen_bodies(logical: Graph) -> GetBodies:
    backwards: dict[str, list[Chunk]] = defaultdict(list)
    for node in logical.chunks:
        if node.forward:
            backwards[node.forward].append(node)

    def bodies(node: Chunk, form: ExpertForm | None, size: int) -> ChunkBodies:
        return _bodies(logical, node, backwards[node.name])

    return bodies


def _bodies(logical: Graph, node: Chunk, backwards: list[Chunk]) -> ChunkBodies:
    outputs = [name for name in node.outputs if logical.values[name].role != "saved"]
    gradients = {
        node.inputs.index(logical.values[name].of): name
        for backward in backwards
        for name in backward.outputs
        if logical.values[name].role in ("grad", "param_grad")
    }
    read = {name for backward in backwards for name in backward.inputs}
    tangents = [i for i, name in enumerate(outputs) if _flows(logical, name, read)]
    params = [i for i, name in enumerate(node.inputs) if logical.values[name].role == "param"]
    inner = [i for i in gradients if i not in params]
    weights = [i for i in gradients if i in params]
    arriving = _refs("tangent", tangents)
    needed = (*arriving, *_refs("input", params))
    others = [i for i, name in enumerate(node.inputs) if i not in params]
    again = _refs(
        "input",
        [i for i in others if node.again == "nothing" or _is_gathered(logical, node.inputs[i])],
    )
    late = again if weights else ()
    early = again if not weights else ()
    kept = (Ref("kept", 0),)
    by_phase = {
        "F": _body(_refs("input", range(len(node.inputs))), _refs("output", range(len(outputs)))),
        "B": _body((*needed, *again), _refs("grad", gradients)),
        "BI": _body((*needed, *early), (*_refs("grad", inner), *kept)) if inner else None,
        "BW": _body((*(kept if inner else arriving), *late), _refs("grad", weights))
        if weights
        else None,
    }
    left = [i for i, name in enumerate(outputs) if logical.values[name].role == "statistic"]
    by_phase["S"] = _body(_refs("output", left), ()) if left else None
    return ChunkBodies(
        by_phase={phase: body for phase, body in by_phase.items() if body},
        saved=(),
        kept=(TensorType(),),
        outputs=tuple(_local(logical, name) for name in outputs),
        grads={index: _local(logical, name) for index, name in gradients.items()},
    )


def _is_gathered(logical: Graph, name: str) -> bool:
    """Whether all ranks have the parts of all, which a backward gathers again."""
    value = logical.values[name]
    made = dict(logical.values[value.source].cut) if value.source else {}
    return any(way == SHARED and isinstance(made.get(axis), Split) for axis, way in value.cut)


def _flows(logical: Graph, output: str, read: set[str]) -> bool:
    """Whether a backward is given the gradient of an output."""
    names = (output, output.partition("[")[0])
    found = (logical.values[name] for name in read)
    owners = (value.of for value in found if value.role in ("grad", "constant"))
    return any(logical.sources.get(owner, owner) in names for owner in owners)


def _refs(kind: RefKind, indexes: Iterable[int]) -> tuple[Ref, ...]:
    return tuple(Ref(kind, index) for index in indexes)


def _body(inputs: tuple[Ref, ...], outputs: tuple[Ref, ...]) -> BodySpec:
    return BodySpec("", inputs, outputs, 0.0)


def _local(logical: Graph, name: str) -> TensorType:
    value = logical.values[name]
    return local(value.type, value.layout, logical.mesh)
