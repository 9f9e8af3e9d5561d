"""The directives by kind: those of this package, and every other class that a program defines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piper.directives.cut import Cut
from piper.directives.declare_mesh import DeclareMesh
from piper.directives.declare_stream import DeclareStream
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.shard_tensor import ShardTensor
from piper.directives.split import Split
from piper.ir.directive import AnyDirective, Directive, Unknown, kind_of

# In the order in which the docs list them.
SHIPPED: tuple[type[Directive], ...] = (
    DeclareMesh, DeclareStream, Cut, Place, Replicate, Shard, ShardTensor, Split, Order, Recompute,
)  # fmt: skip


def known_directives() -> dict[str, type[Directive]]:
    """All classes by kind; nobody replaces one of this package, and of others the latest counts."""
    others = {kind_of(cls): cls for cls in _defined(Directive)}
    return {kind_of(cls): cls for cls in SHIPPED} | {
        kind: cls for kind, cls in others.items() if kind not in _SHIPPED_KINDS
    }


_SHIPPED_KINDS = frozenset(map(kind_of, SHIPPED))


def _defined(base: type[Directive]) -> Iterator[type[Directive]]:
    """The subclasses that can rewrite a graph."""
    for cls in base.__subclasses__():
        if cls.rewrite is not AnyDirective.rewrite:
            yield cls
        yield from _defined(cls)


def read_directive(wanted: type, data: Any) -> Any:
    """What a file holds as a directive (msgspec's `dec_hook`); raises what msgspec expects."""
    if wanted is not AnyDirective:
        raise NotImplementedError(wanted)
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise msgspec.ValidationError("a directive is an object with a `kind`")
    known = known_directives().get(data["kind"])
    return msgspec.convert(data, known).typed() if known else Unknown(data)
