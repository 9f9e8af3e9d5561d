"""The table of rules: a call and its arguments' layouts in; wanted layouts, results and local code out.

A rule is only asked if some argument is not replicated. An operator without a rule wants all of its
arguments replicated: that costs communication, and is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from piper.bodies.operators import bound_arguments
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides

aten = torch.ops.aten


class Emitter(Protocol):
    """Where local code is written."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node: ...

    def place(self) -> fx.Node:
        """The rank's number along the axis, an int64[1]."""
        ...


LocalCode = Callable[[Emitter, list[fx.Node]], fx.Node]
Rule = Callable[["Ask"], "Answer"]


@dataclass(frozen=True)
class Ask:
    """How `node` takes arguments that lie as `layouts` say, over `size` ranks.

    `args` are its tensors in order, with repetitions; `marks` says where the sequence is; `weights` are
    parameters, which never move. Rows that a rank sorts by itself get the `order` of this number; 0 is
    none, so that rows of all ranks are sorted together.
    """

    node: fx.Node
    args: Sequence[fx.Node]
    layouts: Sequence[Layout]
    size: int
    marks: Mapping[fx.Node, Split] = field(default_factory=dict)
    weights: Collection[fx.Node] = ()
    order: int = 0

    @cached_property
    def given(self) -> dict[str, Any]:
        """The call's arguments by name, with defaults."""
        return bound_arguments(self.node.target, self.node.args, self.node.kwargs)

    def shape(self, index: int) -> torch.Size:
        shape: torch.Size = self.args[index].meta["val"].shape
        return shape

    @property
    def made(self) -> Any:
        """The whole result."""
        return self.node.meta["val"]

    @property
    def num_results(self) -> int:
        return len(self.made) if isinstance(self.made, (tuple, list)) else 1

    def summed(self) -> list[Layout]:
        """The arguments' layouts once partial sums have gone where they go."""
        return [
            summed_to(arg, self.marks, self.size) if layout == PARTIAL else layout
            for arg, layout in zip(self.args, self.layouts, strict=True)
        ]

    def all_replicated(self, reason: str = "", blocks: tuple[int, ...] = ()) -> Answer:
        return Answer([REPLICATED] * len(self.args), self.each(REPLICATED), None, reason, blocks)

    def each(self, layout: Layout) -> Layout | list[Layout]:
        """One layout for all results."""
        many = isinstance(self.made, (tuple, list))
        return [layout] * self.num_results if many else layout


@dataclass(frozen=True)
class Answer:
    """`wants` is a layout per tensor argument, `makes` one per result. Without `code` a rank makes the
    same call on its parts. `reason` says why arguments are wanted whole; `blocks`, in blocks of which
    sizes the argument could have been split. `apart`: its piece begins behind all that it reads, so that
    it runs beside communication of that."""

    wants: Sequence[Layout]
    makes: Layout | list[Layout]
    code: LocalCode | None = None
    reason: str = ""
    blocks: tuple[int, ...] = ()
    apart: bool = False


def summed_to(node: fx.Node, marks: Mapping[fx.Node, Split], size: int) -> Layout:
    """Where a partial sum goes: split along the sequence if that is wanted, else replicated."""
    mark = marks.get(node)
    if mark is not None and divides(mark, node.meta["val"].shape, size):
        return mark
    return REPLICATED


_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of these names, in all their overloads."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


def rule_of(node: fx.Node) -> Rule | None:
    known = _RULES.get(operator_name(node))
    if known is not None or not isinstance(node.target, torch._ops.OpOverload):
        return known
    pointwise = torch.Tag.pointwise in node.target.tags
    return _RULES["pointwise"] if pointwise and not node.target._schema.is_mutable else None


def operator_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """A call's tensors in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda arg: found.append(arg) or arg)  # type: ignore[func-returns-value]
    return found


def positive(dim: int, num_dims: int) -> int:
    return dim + num_dims if dim < 0 else dim


def first_split(layouts: Sequence[Layout]) -> Split | None:
    return next((layout for layout in layouts if isinstance(layout, Split)), None)
