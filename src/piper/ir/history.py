"""What was done to a graph: one Record per directive, with the user's line and its effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from piper.errors import Call
from piper.ir.directive import AnyDirective
from piper.ir.form.python_code import call_code
from piper.ir.graph import Graph
from piper.mesh import Mesh, Slice


class Effect(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many nodes of the logical graph a rewrite added, removed and changed."""

    added: int = 0
    removed: int = 0
    changed: int = 0

    def __str__(self) -> str:
        counts = {"adds": self.added, "removes": self.removed, "changes": self.changed}
        words = [
            f"{verb} {count} node{'s'[: count > 1]}" for verb, count in counts.items() if count
        ]
        return ", ".join(words) or "changes no node"


def effect_of(before: Graph, after: Graph) -> Effect:
    """What differs in the nodes of two graphs."""
    old, new = before.nodes, after.nodes
    if new is old:
        return Effect()
    added = changed = 0
    for name, node in new.items():
        was = old.get(name)
        if was is None:
            added += 1
        elif was is not node and was != node:
            changed += 1
    return Effect(added, len(old) - (len(new) - added), changed)


class Composed(msgspec.Struct, frozen=True):
    """A call from which Piper wrote directives, with what was given: `parallel(pp=2, dp=4)`."""

    name: str
    arguments: dict[str, str | int | float | bool]

    def __str__(self) -> str:
        return call_code(self.name, [], self.arguments)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One directive of a program: who asked for it, what it is, what it did to the graph, how many
    `nodes` the logical graph then had, 0 where nobody counted, and what it was `composed` from."""

    call: Call
    directive: AnyDirective
    effect: Effect = Effect()
    nodes: int = 0
    composed: Composed | None = None

    def __str__(self) -> str:
        return self.directive.code()

    @property
    def asked_by(self) -> str:
        """The user's line; without one, as from options of a command, the call that composed it."""
        return str(self.call.source or self.composed or "")


class History(tuple[Record, ...]):
    """The records of all directives; prints as a strategy that can be pasted."""

    __slots__ = ()

    def __str__(self) -> str:
        return history_as_code(self)

    __repr__ = __str__

    def listing(self) -> str:
        """A line per directive: the code, the user's line, and what it did to the graph."""
        rows = [(str(r), str(r.call.source or ""), str(r.effect)) for r in self]
        wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return "".join(
            f"{code:<{wide[0]}}  {source:<{wide[1]}}  {effect}\n" for code, source, effect in rows
        )


_DEGREES = ("pp", "dp", "cp", "tp", "ep")


def degrees(history: Iterable[Record], mesh: Mesh) -> dict[str, int]:
    """Over how many ranks the user asked for what: the degrees that were given, or the axes of the mesh,
    where ranks that hold other experts are no data ranks."""
    for record in history:
        if record.composed and record.directive.kind == "mesh":
            given = record.composed.arguments
            return {n: size for n in _DEGREES if isinstance(size := given.get(n), int)}
    return dict(mesh.axes)


def ranks_text(history: Iterable[Record], mesh: Mesh) -> str:
    """`4 ranks (pp=2 dp=2)`; `1 rank`, where nothing is asked for."""
    ranks = "1 rank" if mesh.size == 1 else f"{mesh.size} ranks"
    asked = " ".join(f"{name}={size}" for name, size in degrees(history, mesh).items())
    return f"{ranks} ({asked})" if asked else ranks


def history_as_code(history: Sequence[Record]) -> str:
    """The directives as a strategy that can be pasted."""
    lines = [str(record) for record in history]
    if not any(record.directive.kind == "mesh" for record in history) and _slices(history):
        lines.insert(0, "mesh = piper.Mesh()")
    body = "".join(f"    {line}\n" for line in lines) or "    pass\n"
    return f"import piper\nfrom piper import where\n\n\ndef strategy(s):\n{body}"


def _slices(history: Iterable[Record]) -> bool:
    """Whether some directive names a slice, and so needs a mesh."""
    return any(
        isinstance(getattr(record.directive, field), Slice)
        for record in history
        for field in getattr(record.directive, "__struct_fields__", ())
    )
