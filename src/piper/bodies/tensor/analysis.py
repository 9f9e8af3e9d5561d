"""Layouts of a chunk's code: layouts of its inputs in; of every node, with changes between them, out.

An operator whose arguments are all replicated is invariant: every rank computes the same, and so are
the gradients. Any other is varying. A replicated Value that a gradient passes is shared by its varying
readers: its gradient is a partial sum there, which is why reading it so is a change of layout.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.chunk_code import ChunkCode
from piper.bodies.tensor.attention_over_ranks import LAID_ANEW, attention_of_parts
from piper.bodies.tensor.changes import Change, Ends, Note, Reading, Ref, SortedApartError
from piper.bodies.tensor.parts import dim_of
from piper.bodies.tensor.readings import Readings, shape_of
from piper.bodies.tensor.rewrites import rewritten
from piper.bodies.tensor.rules.expert_rows import copies_rows, grouped_mm, is_bias_of_rows
from piper.bodies.tensor.rules.losses import vocabulary_terms
from piper.bodies.tensor.rules.rule_table import (
    Answer,
    Ask,
    operator_name,
    rule_of,
    summed_to,
    tensor_args,
)
from piper.bodies.tensor.stand_ins import STAND_INS
from piper.bodies.tensor.strips import AROUND_STRIPS, STRIP, InStrips
from piper.ir.attention_forms import GATHER, AttentionForm
from piper.ir.layouts import (
    PARTIAL,
    REPLICATED,
    SHARED,
    Layout,
    Split,
    divides,
    order_of,
)

# A partial sum goes through these to its one reader; before all others it is summed.
_CARRYING = {
    "add", "sub", "mul", "div", "neg", "view", "reshape", "flatten", "unflatten", "_unsafe_view",
    "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "clone", "alias", "put_rows", "sum",
}  # fmt: skip
# What they make of a parameter, each piece that reads it makes by itself: the parameter never moves.
_OF_WEIGHTS = {
    "_to_copy", "to", "t", "transpose", "permute", "detach", "alias", "view", "unsqueeze"
}  # fmt: skip
# Of which a rank's own rows, in whatever order, give its term.
_SUMS_OF_ROWS = {
    "sum", "mean", "mm", "bmm", "matmul", "einsum", "cross_entropy_loss"
}  # fmt: skip
_GATHERED = (vocabulary_terms,)  # made to be gathered
NO_ENDS = Ends()


class Analysis(Readings):
    """Of one chunk over `size` ranks."""

    def __init__(
        self,
        graph: fx.Graph,
        code: ChunkCode,
        names: Sequence[str],
        given: Mapping[str, Layout],
        size: int,
        marks: dict[fx.Node, Split],
        attention: AttentionForm = GATHER,
        ends: Ends = NO_ENDS,
        sorts_apart: bool = False,
        strips: int = 1,
    ) -> None:
        super().__init__(graph, size)
        self.marks, self.given, self.attention, self.ends = marks, given, attention, ends
        # Each rank may sort its own rows; the orders that there are.
        self.sorts_apart = sorts_apart
        self.strips = InStrips(strips, size, marks)
        self.num_orders = max(map(order_of, given.values()), default=0)
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(holders, names, strict=True))
        self.facts = dict(zip(holders, code.inputs, strict=True))
        self.free: set[fx.Node] = set()  # read no input: each piece makes its own
        self.unread: set[fx.Node] = set()  # of which readers take something cheaper
        self.notes: list[Note] = []
        self.outputs: list[Ref] = []
        self.out_layouts: list[Layout] = []
        results = next(iter(reversed(graph.nodes))).args[0]
        assert isinstance(results, (tuple, list))
        self.shared = {results[index] for index in ends.shared}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._results(node)
            elif node.op == "get_attr":
                self._free(node)
            else:
                self.call(node)
        reached = self.reached(self.outputs)
        self.unread = set(self.graph.nodes) - reached
        self.changes = {key: c for key, c in self.changes.items() if c in reached}

    def _placeholder(self, node: fx.Node) -> None:
        layout = self.given.get(self.inputs[node], REPLICATED)
        self.layouts[node], self.levels[node] = layout, 0
        if self.facts[node].param:
            self.weights[node] = node
            self.readers[node] = set()

    def _free(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        many = isinstance(value, (list, tuple))
        self.layouts[node] = [REPLICATED] * len(value) if many else REPLICATED  # type: ignore[arg-type]
        self.levels[node] = 0
        self.free.add(node)

    def call(self, node: fx.Node) -> None:
        """A node whose arguments are known."""
        if node.target is operator.getitem:
            self._item(node)
            return
        args = tensor_args(node)
        if all(arg in self.free for arg in args) and node.target not in AROUND_STRIPS:
            self._free(node)
            return
        have = self._have(node, args)
        if any(layout != REPLICATED for layout in have):
            new = rewritten(node, args, have, self.marks, self.size)
            if new is None:
                new = self._attention(node, args, have) or self._in_strips(node, args, have)
            if new is not None:
                for each in new:
                    self.call(each)
                return
        answer = self._answer(node, args, have)
        makes = answer.makes if isinstance(answer.makes, list) else [answer.makes]
        varying = any(layout != REPLICATED for layout in (*answer.wants, *makes))
        self.answers[node], self.layouts[node] = answer, answer.makes
        if answer.makes == REPLICATED and self._is_shared(node, args):
            varying, self.layouts[node] = True, SHARED
        assert varying or not self._reads_shared(node, args), (
            f"{node} reads as equal what is shared"
        )
        if self._is_of_weight(node, args):
            self.weights[node] = self.weights[args[0]]
            self.readings[node], self.levels[node] = [Reading(Ref("node", args[0]))], 0
            return
        read = [
            self.reading(arg, want, varying, flows=self.flows(node))
            for arg, want in zip(args, answer.wants, strict=True)
        ]
        self.readings[node] = read
        level = max((self.level_of(each) for each in read), default=0)
        self.levels[node] = level + answer.apart + node.meta.get(STRIP, 0)

    def _attention(
        self, node: fx.Node, args: Sequence[fx.Node], have: Sequence[Layout]
    ) -> list[fx.Node] | None:
        """The nodes for a call of attention in the form that was asked for, if it is possible."""
        new = attention_of_parts(node, args, have, self.size, self.attention)
        if isinstance(new, str):
            self.notes.append(Note(operator_name(node), new, source_of(node), node))
            return None
        if new and node in self.marks:
            self.marks[new[-1]] = self.marks[node]
        return new or None

    def _in_strips(
        self, node: fx.Node, args: Sequence[fx.Node], have: Sequence[Layout]
    ) -> list[fx.Node] | None:
        """The nodes for a product in strips, if that was asked for and is possible."""
        new = self.strips.of(node, args, have, self.weights.keys())
        if isinstance(new, str):
            self.notes.append(Note(operator_name(node), new, source_of(node), node))
            return None
        return new or None

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        layout = self.layouts[source]
        self.layouts[node] = layout[index] if isinstance(layout, list) else layout
        self.levels[node] = self.levels[source]
        self.readings[node] = [Reading(Ref("node", source))]
        if source in self.free:
            self.free.add(node)

    def _is_shared(self, node: fx.Node, args: Sequence[fx.Node]) -> bool:
        """Whether all ranks make the same, but of what they read gradients are partial: that of such a
        Value, or as asked for."""
        copies = node in self.shared and copies_rows(node) and self.flows(node)
        return copies or self._reads_shared(node, args) or self._is_own_share(node)

    def _reads_shared(self, node: fx.Node, args: Sequence[fx.Node]) -> bool:
        """Whether it gives a gradient to what is shared."""
        shared = any(self.flows(arg) and self.layout(arg) == SHARED for arg in args)
        return shared and self.flows(node)

    def _is_own_share(self, node: fx.Node) -> bool:
        """Whether it is a bias of experts that is added to a partial sum: each rank adds its share."""
        if not is_bias_of_rows(node) or len(node.users) != 1:
            return False
        (user,) = node.users
        others = [arg for arg in tensor_args(user) if arg is not node]
        return operator_name(user) == "add" and [self.layouts.get(o) for o in others] == [PARTIAL]

    def _have(self, node: fx.Node, args: Sequence[fx.Node]) -> list[Layout]:
        """The arguments' layouts, partial sums as they are only if the node may carry them on."""
        have = [self.layout(arg) for arg in args]
        if operator_name(node) != "add" or PARTIAL not in have:
            have = [REPLICATED if layout == SHARED else layout for layout in have]
        carries = operator_name(node) in _CARRYING and all(
            layout != PARTIAL or len(arg.users) == 1 for arg, layout in zip(args, have, strict=True)
        )
        if carries:
            return have
        return [
            summed_to(arg, self.marks, self.size) if layout == PARTIAL else layout
            for arg, layout in zip(args, have, strict=True)
        ]

    def _answer(self, node: fx.Node, args: list[fx.Node], have: list[Layout]) -> Answer:
        order = self._next_order(node)
        ask = Ask(node, args, have, self.size, self.marks, self.weights.keys(), order)
        replicated = all(layout == REPLICATED for layout in have)
        if replicated and node.target not in (*STAND_INS, *AROUND_STRIPS):
            return ask.all_replicated()
        known = rule_of(node)
        counts = any(isinstance(layout, Split) and layout.dim is None for layout in have)
        if counts and known is not grouped_mm:
            raise self._apart(node, "it reads how many rows each expert has on all ranks")
        if known is None:
            answer = ask.all_replicated("there is no rule for it")
        else:
            answer = known(ask)
            for arg, want in zip(args, answer.wants, strict=True):
                if not isinstance(want, Split) or want.dim is None:
                    continue
                if not divides(want, shape_of(arg), self.size):
                    length = shape_of(arg)[dim_of(want)]
                    answer = ask.all_replicated(f"{length} does not divide by {self.size} ranks")
                    break
        self._check_orders(node, have, answer)
        self._note(node, args, have, answer, ruled=known is not None)
        return answer

    def _next_order(self, node: fx.Node) -> int:
        if not self.sorts_apart or operator_name(node) != "sort_experts":
            return 0
        self.num_orders += 1
        return self.num_orders

    def _check_orders(self, node: fx.Node, have: list[Layout], answer: Answer) -> None:
        """Rows that a rank has sorted by itself stay there, and apart from rows in other orders, until
        they are put back."""
        makes = answer.makes if isinstance(answer.makes, list) else [answer.makes]
        name = operator_name(node)
        for layout, want in zip(have, answer.wants, strict=True):
            if layout != want and (order_of(layout) or order_of(want)):
                raise self._apart(node, answer.reason or "it reads rows in two orders")
        for made in makes if any(map(order_of, have)) else ():
            if isinstance(made, Split) and not made.order and name != "put_rows":
                raise self._apart(node, "it takes sorted rows apart")
            if made == PARTIAL and name not in _SUMS_OF_ROWS:
                raise self._apart(node, "it makes terms of a sum of sorted rows")

    def check_place(self, node: fx.Node) -> None:
        """Raise where code goes by a rank's place, but reads rows in an order of that rank's own."""
        if any(order_of(self.layout(arg)) for arg in tensor_args(node) if arg in self.layouts):
            raise self._apart(node, "it looks for rows where the whole has them")

    def _apart(self, node: fx.Node, reason: str) -> SortedApartError:
        return SortedApartError(str(Note(operator_name(node), reason, source_of(node), node)))

    def _note(
        self,
        node: fx.Node,
        args: list[fx.Node],
        have: list[Layout],
        answer: Answer,
        *,
        ruled: bool,
    ) -> None:
        costs = any(
            isinstance(layout, Split)
            and want != layout
            and layout != self.marks.get(arg)
            and arg.target not in _GATHERED
            and node.target not in LAID_ANEW
            for arg, layout, want in zip(args, have, answer.wants, strict=True)
        )
        if costs or not ruled:
            reason = answer.reason or "its arguments are split in different ways"
            note = Note(operator_name(node), reason, source_of(node), node, answer.blocks)
            self.notes.append(note)

    def _is_of_weight(self, node: fx.Node, args: Sequence[fx.Node]) -> bool:
        """Whether it is made of one parameter alone, at little cost, and for code of this chunk."""
        alone = len(args) == 1 and args[0] in self.weights and operator_name(node) in _OF_WEIGHTS
        kept = alone and self.answers[node].wants[0] == self.layouts[args[0]]
        return kept and not any(user.op == "output" for user in node.users)

    def _results(self, node: fx.Node) -> None:
        results = node.args[0]
        assert isinstance(results, (tuple, list))
        for index, result in enumerate(results):
            assert isinstance(result, fx.Node)
            self.free.discard(result)
            want = layout = self.layout(result)
            if layout == PARTIAL and index not in self.ends.partial:
                want = summed_to(result, self.marks, self.size)
            ref = self.reading(result, want, varying=want == SHARED).ref
            self.outputs.append(ref)
            # A Value without a gradient may be made for any reader, which the next axis must know.
            self.out_layouts.append(ref.of.read if isinstance(ref.of, Change) else want)
