"""torch.utils.checkpoint in a captured graph in; its code in that graph, marked as regions, out."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from piper.bodies.captured_nodes import source_of, value_of
from piper.bodies.checkpoint_regions import set_region
from piper.errors import TraceError

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph: fx.Graph, module: nn.Module) -> None:
    """Put the code of each checkpointed call in the call's place. Of regions in regions the outermost
    counts: its inputs are saved, and all inside is made again."""
    regions = itertools.count()
    for node in list(graph.nodes):
        if node.target is _CHECKPOINT:
            _refuse_cut_gradient(node)
            _Inlining(graph, module, next(regions)).inline(node, None)


class _Inlining:
    def __init__(self, graph: fx.Graph, module: nn.Module, region: int) -> None:
        self.graph = graph
        self.module = module
        self.region = region

    def inline(self, call: fx.Node, outer: Callable[[], Any] | None) -> None:
        name, *given = call.args
        assert isinstance(name, fx.Node)
        body = self.module.get_submodule(str(name.target))
        assert isinstance(body, fx.GraphModule)
        contexts = outer or body.meta.get("_checkpoint_context_fn")
        inputs = body.graph.find_nodes(op="placeholder")
        copies: dict[fx.Node, Any] = dict(zip(inputs, given, strict=True))
        with self.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    copies[node] = self.graph.node_copy(node, copies.__getitem__)
                    if node.op == "get_attr":
                        copies[node].target = f"{name.target}.{node.target}"
                    _surround(copies[node], call)
                    set_region(copies[node], self.region, contexts)
        [end] = body.graph.find_nodes(op="output")
        results = fx.map_arg(end.args[0], copies.__getitem__)
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(call)
        if not name.users:
            self.graph.erase_node(name)
        for copy in copies.values():
            if isinstance(copy, fx.Node) and copy.target is _CHECKPOINT:
                self.inline(copy, contexts)


def _surround(node: fx.Node, call: fx.Node) -> None:
    """A node also lies in the modules and has the tags that its call has."""
    for key in ("nn_module_stack", "custom"):
        around = call.meta.get(key)
        if around:
            node.meta[key] = {**around, **(node.meta.get(key) or {})}


def _refuse_cut_gradient(call: fx.Node) -> None:
    """Reentrant checkpoints give parameters a gradient only if an argument has one."""
    args = [n for n in call.all_input_nodes if isinstance(value_of(n), Tensor)]
    weights = [n for n in args if n.op == "placeholder" and value_of(n).requires_grad]
    others = [n for n in args if n not in weights and value_of(n).requires_grad]
    if call.kwargs.get("use_reentrant") and weights and not others:
        raise TraceError(
            f"a checkpoint with use_reentrant=True gets no argument with a gradient "
            f"({source_of(call)}): nothing inside would be trained",
            legal="use_reentrant=False",
        )


@torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)
def _sequential(
    functions: Any, segments: int, input: Tensor, use_reentrant: bool | None = None, **options: Any
) -> Tensor:
    """The same for Dynamo, which does not look into torch's."""
    functions = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    reentrant = use_reentrant is None or use_reentrant
    size = len(functions) // segments

    def run(part: Any) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            for function in part:
                input = function(input)
            return input

        return forward

    for start in range(0, size * (segments - 1), size):
        input = checkpoint(
            run(functions[start : start + size]), input, use_reentrant=reentrant, **options
        )
    return run(functions[size * (segments - 1) :])(input)
