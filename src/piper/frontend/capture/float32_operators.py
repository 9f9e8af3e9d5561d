"""A captured step that computes in a narrow dtype in; the same with float32 where it counts out.

As under torch's autocast on CUDA, losses, norms and other sensitive operators take their inputs in
float32, products take them in the narrow dtype (`bodies/operator_dtypes.py`), and all else follows
torch's type promotion, but for residual streams, which stay narrow. Unlike autocast it is the same on
every device, and casts are ordinary nodes. A value that is moved and then read in the narrow dtype alone
is cast before it moves, so that it goes to other stages and to experts with half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.bodies.captured_nodes import OF_DTYPE, value_of
from piper.bodies.casts import CASTS, CapturedRun
from piper.bodies.checkpoint_regions import region_of
from piper.bodies.failed_node import FailedNode
from piper.bodies.leaves import map_leaves, tensors_in
from piper.bodies.operator_dtypes import Rule, moves, rule_of
from piper.frontend.cut.regions import own_tags

NARROW = (torch.float16, torch.bfloat16)


def widen_operators(
    graph: fx.Graph,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    *,
    narrow: torch.dtype,
    model: nn.Module,
) -> None:
    """Put casts into a graph, which runs on `inputs` to know its dtypes. Code under the user's own
    autocast is left to that."""
    root = nn.Module()
    for name, constant in constants.items():
        root.register_buffer(name, constant)
    mode = next(tensor.fake_mode for tensor in inputs if hasattr(tensor, "fake_mode"))
    casting = _Casting(root, graph, narrow, model)
    with mode, torch.enable_grad():
        casting.run(*inputs)
        casting.cast_before_moves()
    for node, dtypes in casting.dtypes.items():
        _retype(node, dtypes)


def _retype(node: fx.Node, dtypes: Sequence[torch.dtype]) -> None:
    """Give a node's fake result, whose sizes may be symbols, the dtypes that it has now."""
    seen = value_of(node)
    if [tensor.dtype for tensor in tensors_in(seen)] != dtypes:
        of = iter(dtypes)
        node.meta["example_value"] = map_leaves(lambda tensor: tensor.to(next(of)), seen)


class _Casting(CapturedRun):
    def __init__(
        self, root: nn.Module, graph: fx.Graph, narrow: torch.dtype, model: nn.Module
    ) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.narrow = narrow
        self.model = model
        self.traced = {n: v for n in graph.nodes if isinstance(v := value_of(n), Tensor)}
        self.dtypes: dict[fx.Node, list[torch.dtype]] = {}  # of the results of calls
        self.casts: dict[Any, fx.Node] = {}
        # Versions of a node's result when it was made, and of its inputs when it read them.
        self.made: dict[fx.Node, int] = {}
        self.read: dict[fx.Node, dict[fx.Node, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            if n.op.startswith("call") and CASTS not in n.meta:
                for arg, dtype in self._wanted(n).items():
                    n.replace_input_with(arg, self._cast(arg, dtype, n, self.env[arg]._version))
            floating = [arg for arg in n.all_input_nodes if self._floats(arg)]
            self.read[n] = {arg: self.env[arg]._version for arg in floating}
            result = super().run_node(n)
        except Exception as error:
            raise FailedNode(n, error).told() from error
        if n.op.startswith("call"):
            self.dtypes[n] = [tensor.dtype for tensor in tensors_in(result)]
        if isinstance(result, Tensor):
            self.made[n] = result._version
        return result

    def cast_before_moves(self) -> None:
        """`%m = flatten(%x)`, `%c = %m.to(bfloat16)`  ->  `%c = %x.to(bfloat16)`, `%m = flatten(%c)`."""
        for node in reversed(list(self.graph.nodes)):
            if not self._is_moved_to_casts(node):
                continue
            for arg, version in self.read[node].items():
                if self.env[arg].dtype == torch.float32:
                    node.replace_input_with(arg, self._cast(arg, self.narrow, node, version))
            for cast in list(node.users):
                cast.replace_all_uses_with(node)
                self.graph.erase_node(cast)
                del self.dtypes[cast]
            self.dtypes[node] = [self.narrow]

    def _is_moved_to_casts(self, node: fx.Node) -> bool:
        """Whether a float32 value is only moved here, and all its readers cast it as it is now."""
        if self.dtypes.get(node) != [torch.float32] or CASTS in node.meta or not moves(node):
            return False
        if any(arg.op == "placeholder" for arg in self.read[node]):
            return False
        return bool(node.users) and all(
            user.meta.get(OF_DTYPE)
            and self.dtypes[user] == [self.narrow]
            and self.read[user][node] == self.made[node]
            for user in node.users
        )

    def _wanted(self, node: fx.Node) -> dict[fx.Node, torch.dtype]:
        """The inputs that are cast, and to what."""
        rule = rule_of(node)
        floating = {arg: self.env[arg].dtype for arg in node.all_input_nodes if self._floats(arg)}
        wanted: dict[fx.Node, torch.dtype] = {}
        if rule is Rule.FLOAT32:
            wanted = {arg: torch.float32 for arg, dtype in floating.items() if dtype in NARROW}
        elif rule is Rule.NARROW:
            wanted = {arg: self.narrow for arg in floating if floating[arg] != torch.float64}
        elif rule is Rule.EQUAL and floating:
            wanted = dict.fromkeys(floating, reduce(torch.promote_types, floating.values()))
        elif rule is Rule.TARGET and (target := node.all_input_nodes[0]) in floating:
            wanted = dict.fromkeys(floating, floating[target])
        elif rule is Rule.TRACED:
            wanted = {arg: self.traced[arg].dtype for arg in floating if arg in self.traced}
        elif rule is Rule.SUM and (branch := self._branch(node, floating)):
            wanted = {branch: self.narrow}
        return {arg: dtype for arg, dtype in wanted.items() if dtype != floating[arg]}

    def _branch(self, node: fx.Node, floating: Mapping[fx.Node, torch.dtype]) -> fx.Node | None:
        """`f(x)` of a sum `x + f(x)`, if x is narrow, f(x) is float32 and f has products. The sums of
        norms and losses are not of this kind."""
        dtypes = {dtype: arg for arg, dtype in floating.items() if self.env[arg].dim()}
        stream, branch = dtypes.get(self.narrow), dtypes.get(torch.float32)
        if stream is None or branch is None or node not in self.traced:
            return None
        if self.traced[node].dtype != self.narrow:
            return None
        behind, pending = {branch}, [branch]
        while pending:
            args = pending.pop().all_input_nodes
            new = {arg for arg in args if not arg < stream} - behind
            behind |= new
            pending.extend(new - {stream})
        has_products = any(rule_of(arg) is Rule.NARROW for arg in behind - {stream})
        return branch if stream in behind and has_products else None

    def _floats(self, node: fx.Node) -> bool:
        value = self.env[node]
        return isinstance(value, Tensor) and value.is_floating_point()

    def _cast(self, arg: fx.Node, dtype: torch.dtype, node: fx.Node, version: int) -> fx.Node:
        """A value in another dtype, for a node. One cast serves all of a module in a region, until the
        value is changed. Changes of the graph's inputs may show nowhere: each node has its own cast."""
        key = (arg, dtype, *self._place(node))
        made = self.casts.get(key)
        if made is not None and self.read[made] == {arg: version} and arg.op != "placeholder":
            if node < made:
                node.prepend(made)
            return made
        with self.graph.inserting_before(node):
            made = self.graph.call_method("to", (arg, dtype))
        made.meta = {**node.meta, "example_value": self.traced.get(arg), OF_DTYPE: True}
        self.dtypes[made] = [dtype]
        self.env[made] = self.env[arg].to(dtype)
        self.casts[key], self.read[made] = made, {arg: version}
        return made

    def _place(self, node: fx.Node) -> Iterable[Any]:
        """The region and the module of a node; linear layers count as code of the module around."""
        modules = [*(node.meta.get("nn_module_stack") or {}).values()]
        if modules and modules[-1][1] is nn.Linear:
            modules.pop()
        tags = own_tags(node, self.model)
        return tuple(sorted(tags.items())), region_of(node), tuple(path for path, _ in modules)
