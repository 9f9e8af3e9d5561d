"""How readers get Values: a node and the layout that is wanted in; itself, a part or a change out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, fx

from piper.bodies.tensor.changes import Change, Reading, Ref
from piper.bodies.tensor.forward_code import FLOWS
from piper.bodies.tensor.parts import dim_of, local_shape
from piper.bodies.tensor.rules.rule_table import Answer, aten, operator_name, tensor_args
from piper.ir.layouts import REPLICATED, SHARED, Layout, Split


class Readings:
    """What is known of the nodes of a graph that `size` ranks run.

    `layouts` has a list for a node with several results. `levels` counts the changes of layout before a
    node. `weights` has parameters and what is made of one alone, to the parameter; `readers` says of a
    parameter whether code that reads it varies between ranks, or None of code that gives it no gradient.
    """

    def __init__(self, graph: fx.Graph, size: int) -> None:
        self.graph, self.size = graph, size
        self.layouts: dict[fx.Node, Layout | list[Layout]] = {}
        self.levels: dict[fx.Node, int] = {}
        self.weights: dict[fx.Node, fx.Node] = {}
        self.readers: dict[fx.Node, set[bool | None]] = {}
        self.answers: dict[fx.Node, Answer] = {}
        self.readings: dict[fx.Node, list[Reading]] = {}
        self.changes: dict[tuple[fx.Node, Layout], Change] = {}
        self._expanded: dict[tuple[fx.Node, Layout], fx.Node] = {}
        self._names: Counter[str] = Counter()

    def flows(self, node: fx.Node) -> bool:
        return bool(node.meta.get(FLOWS))

    def layout(self, node: fx.Node) -> Layout:
        layout = self.layouts[node]
        assert not isinstance(layout, list), node
        return layout

    def reached(self, outputs: Sequence[Ref]) -> set[fx.Node | Change]:
        """The nodes and changes that outputs are made of."""
        reached: set[fx.Node | Change] = set()
        stack = [ref.of for ref in outputs]
        while stack:
            of = stack.pop()
            if of is None or of in reached:
                continue
            reached.add(of)
            if isinstance(of, Change):
                stack.append(of.previous or of.source)
            else:
                stack += (reading.ref.of for reading in self.readings.get(of, ()))
        return reached

    def level_of(self, reading: Reading) -> int:
        of = reading.ref.of
        assert of is not None
        return of.level if isinstance(of, Change) else self.levels[of]

    def reading(self, arg: fx.Node, want: Layout, varying: bool, *, flows: bool = True) -> Reading:
        """The Value that a reader gets: itself, a part that it takes of it, or a change of layout.
        `flows`: whether a gradient comes back from the reader."""
        have = self.layout(arg)
        if arg in self.weights and have in (want, REPLICATED):
            if self.flows(arg):
                self.readers[self.weights[arg]].add(varying if flows else None)
            return Reading(
                Ref("node", arg), want if isinstance(want, Split) and want != have else None
            )
        if have == SHARED:
            return Reading(Ref("node", arg), want if isinstance(want, Split) else None)
        shared = varying and self.flows(arg)
        if have == want and not (have == REPLICATED and shared):
            return Reading(Ref("node", arg))
        if have == REPLICATED and isinstance(want, Split):
            if not self.flows(arg):
                return Reading(Ref("node", arg), want)
            if (expanded := self._expanded_less(arg, want)) is not None:
                return Reading(Ref("node", expanded))
            return Reading(Ref("change", self._change(arg, have, SHARED)), want)
        same = isinstance(have, Split) and isinstance(want, Split) and have.dim == want.dim
        if same and isinstance(want, Split) and not want.turn:
            # In other blocks: no rank has all of what another one sends it, so that each takes its part
            # of the whole.
            return Reading(Ref("change", self._change(arg, have, SHARED)), want)
        if want == REPLICATED and (shared or not self.flows(arg)):
            want = SHARED
        return Reading(Ref("change", self._change(arg, have, want)))

    def _change(self, arg: fx.Node, have: Layout, want: Layout) -> Change:
        if (arg, want) not in self.changes:
            if arg.op != "placeholder":  # one piece makes it, and all others get it changed
                self.weights.pop(arg, None)
            previous = None
            word = f"split{want.dim}" if isinstance(want, Split) else str(want)
            if isinstance(want, Split) and want.turn:
                word = f"turn{want.turn}"
                if want.turn > 1:
                    before = want.at_turn(want.turn - 1)
                    previous = self._change(arg, have, before)
                    have = before
            name = f"{arg.name}-{word}"
            self._names[name] += 1
            if self._names[name] > 1:  # in other blocks, whose sizes may depend on rows
                name = f"{name}.{self._names[name]}"
            # What the chunk is given takes nothing to be shared, so that no piece ends for it.
            given = arg.op == "placeholder" and (have, want) == (REPLICATED, SHARED)
            level = self.levels[arg] + (not given)
            self.changes[arg, want] = Change(arg, have, want, name, level, previous)
        return self.changes[arg, want]

    def _expanded_less(self, arg: fx.Node, want: Split) -> fx.Node | None:
        """Instead of a part of what was expanded along the dim, the same expanded less."""
        if arg.op != "call_function" or operator_name(arg) != "expand":
            return None
        source = tensor_args(arg)[0]
        dim = dim_of(want) - (len(shape_of(arg)) - len(shape_of(source)))
        if dim >= 0 and shape_of(source)[dim] != 1:
            return None
        if (arg, want) not in self._expanded:
            shape = list(local_shape(shape_of(arg), want, self.size))
            with self.graph.inserting_after(arg):
                less = self.graph.call_function(aten.expand.default, (source, list(shape_of(arg))))
            less.meta = dict(arg.meta)
            self.answers[less] = Answer(
                [REPLICATED], want, lambda to, args: to.call(aten.expand.default, args[0], shape)
            )
            self.layouts[less] = want
            self.readings[less] = [self.reading(source, REPLICATED, True)]
            self.levels[less] = self.level_of(self.readings[less][0])
            self._expanded[arg, want] = less
        return self._expanded[arg, want]


def shape_of(node: fx.Node) -> Sequence[int]:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.shape
