"""The store of bodies: asks for each distinct one once, keeps the text that travels to workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piper.bodies.chunk_code import ChunkCode, spec_of
from piper.bodies.cutting.body_memory import moments_inside, refuse_shared_memory
from piper.bodies.cutting.failing_code import blaming
from piper.bodies.cutting.joint import trace_joint
from piper.bodies.cutting.linalg_checks import nan_where_checks_fail
from piper.bodies.cutting.narrow_norms import narrow_norms
from piper.bodies.cutting.partition import Half, Recompute, partition
from piper.bodies.cutting.routed import Routing, bounded, route
from piper.bodies.cutting.row_wise import refuse_mixed_rows
from piper.bodies.cutting.unsure_strides import reshape_where_unsure
from piper.bodies.files.codec import content_hash, encode
from piper.bodies.files.codec import load as load
from piper.bodies.flops import operator_flops
from piper.bodies.folding import Fold, trace_fold
from piper.bodies.products import products_of
from piper.ir.tensor_type import TensorType
from piper.plan.body_spec import BodySpec, ChunkBodies, Ref


class BodyStore:
    """Bodies by content hash. Chunks with equal code, shapes and device share theirs."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._made: dict[tuple[Any, ...], ChunkBodies] = {}

    @torch.enable_grad()
    def chunk(
        self,
        code: ChunkCode,
        *,
        device: str,
        routing: Routing | None = None,
        recompute: Recompute = "",
        data_ranks: int = 1,
    ) -> ChunkBodies:
        """`data_ranks` is how many have their part in the state that the chunk changes."""
        key = (code.key, code.targets, device, routing, recompute, code.fold and data_ranks)
        if key not in self._made:
            made = self._build(code, device, routing, recompute)
            if code.fold is not None:
                made.by_phase["S"] = self._fold(code, code.fold, data_ranks, device)
            self._made[key] = made
        return self._made[key]

    def _fold(self, code: ChunkCode, fold: Fold, data_ranks: int, device: str) -> BodySpec:
        inputs = {index: code.inputs[index].spec for index in fold.buffers}
        packs = {index: code.outputs[index] for index in fold.packs}
        module = trace_fold(fold, inputs, packs, ranks=data_ranks, device=device)
        constants = {
            str(node.target): getattr(module, str(node.target))
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        buffers = tuple(Ref("input", index) for index in fold.buffers)
        return BodySpec(
            hash=self.add(module.graph, constants),
            inputs=(*buffers, *(Ref("output", index) for index in fold.packs)),
            outputs=buffers,
            flops=0.0,
            inside=moments_inside(module.graph),
        )

    def add(self, graph: fx.Graph, constants: dict[str, torch.Tensor]) -> str:
        text = encode(graph, constants)
        name = content_hash(text)
        self.texts[name] = text
        return name

    def _build(
        self, code: ChunkCode, device: str, routing: Routing | None, recompute: Recompute
    ) -> ChunkBodies:
        run = None
        with blaming(code, device=device):
            if routing is not None:
                code, run = route(code, routing, device=device)
            joint = trace_joint(code, device=device, run=run)
        nan_where_checks_fail(joint.graph)
        reshape_where_unsure(joint.graph)
        if device == "cuda":
            narrow_norms(joint.graph)
        growth = min(routing.max_load, routing.num_ranks) if routing else 1.0
        parts = partition(joint, code, recompute)
        if routing is not None:
            refuse_mixed_rows(parts.forward, counts=routing.counts, rows=routing.rows)
        constants = {
            str(node.target): getattr(joint.module, str(node.target))
            for node in joint.graph.nodes
            if node.op == "get_attr"
        }
        halves = {
            "F": parts.forward,
            "B": parts.backward,
            "BI": parts.input_half,
            "BW": parts.weight_half,
        }
        return ChunkBodies(
            by_phase={p: self._spec(h, constants, growth) for p, h in halves.items() if h},
            saved=_types(parts.forward, "saved", routing),
            kept=_types(parts.input_half, "kept", routing),
            outputs=code.outputs,
            grads={i: given.spec for i, given in enumerate(code.inputs) if given.grad},
        )

    def _spec(self, half: Half, constants: dict[str, torch.Tensor], growth: float) -> BodySpec:
        refuse_shared_memory(half.graph)
        return BodySpec(
            hash=self.add(half.graph, constants),
            inputs=tuple(half.inputs),
            outputs=tuple(half.outputs),
            flops=flops(half.graph),
            inside=moments_inside(half.graph, growth=growth),
            products=tuple(i for i in products_of(half.graph) if half.outputs[i].kind == "grad"),
        )


def _types(half: Half | None, kind: str, routing: Routing | None) -> tuple[TensorType, ...]:
    """What a half hands on to a later one."""
    if half is None:
        return ()
    num = sum(ref.kind == kind for ref in half.outputs)
    types = [spec_of(node.meta["val"]) for node in half.results[len(half.results) - num :]]
    ranks = routing.num_ranks if routing else 1
    return tuple(bounded(t, ranks) if t.bound is not None else t for t in types)


def flops(graph: fx.Graph) -> float:
    """Floating-point operations of the matrix products in a graph, from the traced shapes."""
    total = 0
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet is not None and "val" in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            total += operator_flops(packet, args, kwargs, node.meta["val"])
    return float(total)
