"""interpret: one run of the captured graph on fake tensors, for facts that its text does not show.

What shares memory with what, what is changed in place and who sees it, which operators are random, and
through which nodes a gradient of the loss passes: all as autograd itself has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.casts import CapturedRun, casting, noting_cast_weights
from piper.bodies.closed_operator import ClosedOperator
from piper.bodies.dtype_watch import DtypeWatch
from piper.bodies.failed_node import FailedNode
from piper.bodies.leaves import tensors_in
from piper.bodies.operators import RandomWatch
from piper.bodies.unseen_changes import UnseenChanges
from piper.errors import TraceError
from piper.frontend.capture.any_rows import at_rows, detached
from piper.frontend.capture.statistics import NORMS


@dataclass
class Facts:
    """What is known of each node.

    `changes` holds the memory that a node changes in place; `seen_by` the later nodes that see the
    change although no edge of the graph says so, and `sees` the same the other way round; `random` the
    operators with which a node draws random numbers.
    """

    memory: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    changes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    seen_by: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    sees: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    changers_inputs: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    random: dict[fx.Node, list[Any]] = field(default_factory=dict)
    flowing: set[fx.Node] = field(default_factory=set)

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that a node depends on, by its arguments or by what they changed."""
        return [*node.all_input_nodes, *self.sees.get(node, ())]

    def inputs_with_changers(self, node: fx.Node) -> list[fx.Node]:
        """Also what later changes of a node's own memory read before it: `out = zeros_like(x)` belongs
        where `out[i] = y` is, after y."""
        return [*self.inputs(node), *self.changers_inputs.get(node, ())]


def interpret(
    graph: fx.Graph, constants: dict[str, Tensor], inputs: Sequence[Tensor], *, open_rows: bool
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], Facts]:
    """The graph for inputs of this size, what became of each node, and what is known of the new ones;
    without `open_rows` the graph is one for this size."""
    root = torch.nn.Module()
    for name, constant in constants.items():
        root.register_buffer(name, constant)
    run = _Run(root, graph, open_rows)
    mode = next(tensor.fake_mode for tensor in inputs if hasattr(tensor, "fake_mode"))
    with mode, torch.enable_grad():
        run.run(*inputs)
    for node in run.random_backwards:
        raise TraceError(
            f"the backward of an autograd.Function draws random numbers ({source_of(node)})",
            legal="numbers drawn in its forward and saved for the backward",
        )
    copies = {node: node for node in graph.nodes}
    if open_rows:
        graph, copies = at_rows(graph, run.values)
        run.move(graph, copies)
    run.find_observers()
    run.find_changers_inputs()
    run.find_flow()
    return graph, copies, run.facts


class _Run(CapturedRun):
    def __init__(self, module: torch.nn.Module, graph: fx.Graph, keep_values: bool) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.keep_values = keep_values
        self.values: dict[fx.Node, Any] = {}
        self.facts = Facts()
        self.results: dict[fx.Node, list[Tensor]] = {}
        self.grad_fns: dict[fx.Node, list[Any]] = defaultdict(list)
        self.lying_in: dict[int, list[Tensor]] = defaultdict(list)  # memory -> results so far
        self.of_inputs: set[int] = set()  # memory
        self.unseen = UnseenChanges()
        self.random_backwards: list[fx.Node] = []
        self.closed_edges: dict[Any, set[Any]] = {}  # autograd nodes -> those they give no gradient

    def run_node(self, n: fx.Node) -> Any:
        given = [t for arg in n.all_input_nodes for t in tensors_in(self.env[arg])]
        versions = [t._version for t in given]
        lay = [_memory(t) for t in given]  # set_ gives a tensor other memory
        unseen = self._unseen_changes(n, given)
        with noting_cast_weights(n, self.env), RandomWatch() as watch, DtypeWatch():
            try:
                result = super().run_node(n)
            except Exception as error:
                raise FailedNode(n, error) from error
        if self.keep_values:
            # As it is now: a change in place may give a tensor another shape later.
            self.values[n] = detached(result)
        changed = [i for i, t in enumerate(given) if t._version != versions[i]]
        self.results[n] = tensors_in(result)
        self.facts.memory[n] = frozenset(map(_memory, self.results[n]))
        now = (_memory(given[i]) for i in changed)
        self.facts.changes[n] = frozenset((*now, *(lay[i] for i in changed), *unseen))
        if watch.seen:
            self.facts.random[n] = watch.seen
        if n.op == "placeholder":
            self.of_inputs |= self.facts.memory[n]
        for tensor in self.results[n]:
            self.lying_in[_memory(tensor)].append(tensor)
        # A change through a view also gives a new history to its base, and to other views.
        touched = [*self.results[n]]
        touched += [t for memory in self.facts.changes[n] for t in self.lying_in[memory]]
        # Some operators return views of a result that is no node's; history hangs on that one.
        touched += [t._base for t in touched if t._base is not None]
        self.grad_fns[n] = _grad_fns(touched)
        if isinstance(n.target, ClosedOperator):
            self._try_backward(n, given)
        return result

    def _try_backward(self, node: fx.Node, given: Sequence[Tensor]) -> None:
        """Run the backward that a user wrote: it may give an input no gradient, or draw numbers."""
        results = [tensor for tensor in self.results[node] if tensor.requires_grad]
        inputs = [tensor for tensor in given if tensor.requires_grad]
        if not results or not inputs:
            return
        ones = [*map(torch.ones_like, results)]
        with RandomWatch() as watch:
            try:
                grads = torch.autograd.grad(
                    results, inputs, ones, retain_graph=True, allow_unused=True
                )
            except Exception as error:
                raise FailedNode(node, error, backward=True) from error
        if watch.seen:
            self.random_backwards.append(node)
        closed = {
            f for t, g in zip(inputs, grads, strict=True) if g is None for f in _grad_fns([t])
        }
        for function in _grad_fns(results):
            self.closed_edges[function] = closed

    def _unseen_changes(self, node: fx.Node, given: Sequence[Tensor]) -> list[int]:
        """The memory of inputs of the graph that a node changes, though no version would show it."""
        if node.op == "placeholder":
            return []
        norm = node.target in NORMS  # which changes running values, whosoever they are
        if not norm and not any(_memory(tensor) in self.of_inputs for tensor in given):
            return []
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        with casting(node):
            return [_memory(tensor) for tensor in self.unseen.changed(node, args, kwargs)]

    def move(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
        """Make what was seen of nodes known of their copies in another graph."""

        def moved(known: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
            return {copies[node]: value for node, value in known.items() if node in copies}

        self.graph = graph
        self.results, self.grad_fns = moved(self.results), moved(self.grad_fns)
        self.facts.memory, self.facts.changes = moved(self.facts.memory), moved(self.facts.changes)
        self.facts.random = moved(self.facts.random)

    def find_observers(self) -> None:
        """Who reads or changes memory after another node has changed it."""
        changers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            reached = set(self.facts.memory.get(node, ()))
            for arg in node.all_input_nodes:
                reached |= self.facts.memory[arg]
            for memory in reached:
                for changer in changers[memory]:
                    if changer is not node and changer not in self.facts.sees[node]:
                        self.facts.sees[node].append(changer)
                        self.facts.seen_by[changer].append(node)
            for memory in self.facts.changes.get(node, ()):
                changers[memory].append(node)

    def find_changers_inputs(self) -> None:
        position = {node: index for index, node in enumerate(self.graph.nodes)}
        changers: dict[int, list[fx.Node]] = defaultdict(list)
        for node, changed in self.facts.changes.items():
            for memory in changed:
                changers[memory].append(node)
        for node, memories in self.facts.memory.items():
            later = [
                c for m in memories for c in changers.get(m, ()) if position[c] > position[node]
            ]
            self.facts.changers_inputs[node] = [
                arg for c in later for arg in c.all_input_nodes if position[arg] < position[node]
            ]

    def find_flow(self) -> None:
        """Every node whose result autograd reaches from the loss."""
        output = next(iter(reversed(self.graph.nodes)))
        loss = self.results[output.all_input_nodes[0]][0]
        reached: set[Any] = set()
        stack = _grad_fns([loss])
        while stack:
            function = stack.pop()
            if function is not None and function not in reached:
                reached.add(function)
                closed = self.closed_edges.get(function, ())
                stack += [f for f, _ in function.next_functions if f not in closed]
        for node, tensors in self.results.items():
            now = _grad_fns(tensors)
            if node.op != "output" and any(f in reached for f in (*now, *self.grad_fns[node])):
                self.facts.flowing.add(node)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _grad_fns(tensors: Sequence[Tensor]) -> list[Any]:
    """The autograd nodes of tensors; a leaf's is the one that would accumulate into it."""
    found = []
    for tensor in tensors:
        if not tensor.requires_grad:
            continue
        try:
            function = tensor.grad_fn
        except RuntimeError:  # one of several views, whose base was changed: nobody may read it now
            continue
        found.append(function or torch.autograd.graph.get_gradient_edge(tensor).node)
    return found
