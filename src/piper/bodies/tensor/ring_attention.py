"""Attention as turns of a ring: a call on parts of a sequence in, a node per turn out.

Keys and values go from rank to rank, once between two turns. A turn attends to those that are there,
and adds to what the turns before have left: per query the weighted sum of values, the sum of weights,
and the largest score, by which weights are scaled. What comes out does not depend on that scale, so
that no gradient passes it. Plain operators, which AOTAutograd differentiates as all others.

Where queries see no later keys and each rank has an early and a late part of the sequence, a turn has
half the work: late queries see all early keys; and either early queries do, or late ones the late keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from piper.bodies.operators import bound_arguments
from piper.bodies.tensor.forward_code import SEQUENCE
from piper.bodies.tensor.rewrites import inserted, replaced
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, aten, rule
from piper.ir.layouts import Split

TURN = "piper_turn"  # in the meta of the functions below
LAID = "piper_lies"  # likewise: how queries, keys and values lie


@dataclass(frozen=True)
class Turn:
    """One turn of a call: its number, a rank's queries, dims of a head, and how the call is made."""

    number: int
    rows: int
    key_dims: int
    value_dims: int
    grouped: int  # heads of queries for one of keys
    scale: float
    causal: bool
    dtype: torch.dtype
    device: torch.device
    paired: bool  # a rank has an early and a late part

    @property
    def summed_in(self) -> torch.dtype:
        low = self.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if low else self.dtype


def ring_load(keys: Tensor, values: Tensor) -> Tensor:
    """What goes round: keys and values side by side."""
    raise NotImplementedError


def ring_turn(queries: Tensor, load: Tensor, left: Tensor | None = None) -> Tensor:
    """What a turn leaves for the next: sums of values, of weights, and largest scores, side by side."""
    raise NotImplementedError


def ring_end(left: Tensor) -> Tensor:
    """The result of attention."""
    raise NotImplementedError


def ring_nodes(
    node: fx.Node, args: Sequence[fx.Node], sequence: Split, size: int
) -> list[fx.Node] | str:
    """The nodes for a call on queries, keys and values that are split along the sequence; or why not."""
    given = bound_arguments(node.target, node.args, node.kwargs)
    query, key, value = (arg.meta["val"] for arg in args[:3])
    if given["attn_mask"] is not None:
        return "a ring knows no mask but the causal one: keys and values are gathered"
    if query.dim() != 4 or query.shape[2] != key.shape[2]:
        return "a ring needs heads, and as many keys as queries: keys and values are gathered"
    paired = sequence.blocks == 2 and sequence.mirrored
    if given["is_causal"] and not paired and sequence != Split(2):
        return "its queries are split in blocks, so keys and values are gathered"
    scale = given["scale"]
    first = Turn(
        0,
        query.shape[2] // size,
        key.shape[3],
        value.shape[3],
        query.shape[1] // key.shape[1],
        1 / math.sqrt(query.shape[3]) if scale is None else scale,
        given["is_causal"],
        value.dtype,
        value.device,
        paired,
    )
    load = inserted(node, ring_load, tuple(args[1:3]), torch.cat([key, value], 3))
    sums = value.new_empty((*query.shape[:3], first.value_dims + 2), dtype=first.summed_in)
    nodes = [load]
    for number in range(size):
        read = (args[0], load, *nodes[1:][-1:])
        nodes.append(inserted(node, ring_turn, read, sums))
        nodes[-1].meta[TURN] = replace(first, number=number)
    nodes.append(inserted(node, ring_end, (nodes[-1],), node.meta["val"]))
    nodes[-1].meta[TURN], nodes[-1].meta[SEQUENCE] = first, 2
    for each in nodes:
        each.meta[LAID] = sequence
    return replaced(node, nodes)


@rule("ring_load")
def ring_load_rule(ask: Ask) -> Answer:
    lies: Split = ask.node.meta[LAID]
    return Answer([lies] * 2, lies, lambda to, args: to.call(aten.cat.default, list(args), 3))


@rule("ring_turn")
def ring_turn_rule(ask: Ask) -> Answer:
    turn: Turn = ask.node.meta[TURN]
    lies: Split = ask.node.meta[LAID]
    wants = [lies, lies.at_turn(turn.number), *[lies] * (len(ask.args) - 2)]
    halves = turn.causal and turn.paired and turn.number > 0
    attend = _attend_halves if halves else _attend_all
    return Answer(wants, lies, lambda to, args: attend(to, args, turn), apart=True)


@rule("ring_end")
def ring_end_rule(ask: Ask) -> Answer:
    turn: Turn = ask.node.meta[TURN]
    lies: Split = ask.node.meta[LAID]

    def end(to: Emitter, args: list[fx.Node]) -> fx.Node:
        total = to.call(aten.slice.Tensor, args[0], 3, 0, turn.value_dims)
        weights = to.call(aten.slice.Tensor, args[0], 3, turn.value_dims, turn.value_dims + 1)
        return _as(to, to.call(aten.div.Tensor, total, weights), turn.summed_in, turn.dtype)

    return Answer([lies], lies, end)


def _attend_all(to: Emitter, args: list[fx.Node], turn: Turn) -> fx.Node:
    return _attend(to, args, turn, _hidden(to, turn) if turn.causal else None)


def _attend_halves(to: Emitter, args: list[fx.Node], turn: Turn) -> fx.Node:
    """Two products of halves, of one shape on all ranks; which second one it is depends on whether keys
    come from a rank before."""
    ahead = to.call(aten.ge.Scalar, to.place(), turn.number)
    (queries0, queries1), (load0, load1), (left0, left1) = (_halves(to, arg, turn) for arg in args)

    def chosen(one: fx.Node, other: fx.Node) -> fx.Node:
        return to.call(aten.where.self, ahead, one, other)

    left1 = _attend(to, [queries1, load0, left1], turn, None)
    second = [chosen(queries0, queries1), chosen(load0, load1), chosen(left0, left1)]
    new = _attend(to, second, turn, None)
    return to.call(aten.cat.default, [chosen(new, left0), chosen(left1, new)], 2)


def _halves(to: Emitter, part: fx.Node, turn: Turn) -> tuple[fx.Node, fx.Node]:
    middle = turn.rows // 2
    first = to.call(aten.slice.Tensor, part, 2, 0, middle)
    return first, to.call(aten.slice.Tensor, part, 2, middle, turn.rows)


def _attend(to: Emitter, args: list[fx.Node], turn: Turn, hidden: fx.Node | None) -> fx.Node:
    queries, load, *left = args
    width = turn.key_dims
    keys = _heads(to, to.call(aten.slice.Tensor, load, 3, 0, width), turn)
    values = to.call(aten.slice.Tensor, load, 3, width, width + turn.value_dims)
    values = _heads(to, values, turn)
    scores = to.call(aten.matmul.default, queries, to.call(aten.transpose.int, keys, 2, 3))
    scores = _as(to, scores, turn.dtype, turn.summed_in)
    scores = to.call(aten.mul.Tensor, scores, turn.scale)
    if hidden is not None:
        scores = to.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)
    most = to.call(aten.amax.default, to.call(aten.detach.default, scores), [3], True)
    before: list[fx.Node] = []
    if left:
        before = [
            to.call(aten.slice.Tensor, left[0], 3, start, end)
            for start, end in _spans(turn.value_dims)
        ]
        before[2] = to.call(aten.detach.default, before[2])
        most = to.call(aten.maximum.default, most, before[2])
    weights = to.call(aten.exp.default, to.call(aten.sub.Tensor, scores, most))
    total = to.call(aten.matmul.default, _as(to, weights, turn.summed_in, turn.dtype), values)
    total = _as(to, total, turn.dtype, turn.summed_in)
    weight = to.call(aten.sum.dim_IntList, weights, [3], True)
    if left:
        less = to.call(aten.exp.default, to.call(aten.sub.Tensor, before[2], most))
        total = to.call(aten.add.Tensor, to.call(aten.mul.Tensor, before[0], less), total)
        weight = to.call(aten.add.Tensor, to.call(aten.mul.Tensor, before[1], less), weight)
    return to.call(aten.cat.default, [total, weight, most], 3)


def _spans(width: int) -> list[tuple[int, int]]:
    """Where sums of values, sums of weights and largest scores lie."""
    return [(0, width), (width, width + 1), (width + 1, width + 2)]


def _hidden(to: Emitter, turn: Turn) -> fx.Node:
    """Which keys queries do not see: own ones as ever, those of ranks behind not at all."""
    if turn.number:
        return to.call(aten.lt.Scalar, to.place(), turn.number)
    rows = to.call(aten.arange.default, turn.rows, device=turn.device)
    return to.call(aten.lt.Tensor, to.call(aten.unsqueeze.default, rows, 1), rows)


def _heads(to: Emitter, part: fx.Node, turn: Turn) -> fx.Node:
    """Heads of keys or values, once for each head of queries."""
    if turn.grouped == 1:
        return part
    return to.call(aten.repeat_interleave.self_int, part, turn.grouped, 1)


def _as(to: Emitter, value: fx.Node, have: torch.dtype, want: torch.dtype) -> fx.Node:
    return value if have == want else to.call(aten._to_copy.default, value, dtype=want)
