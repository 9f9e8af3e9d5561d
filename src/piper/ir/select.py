"""Selectors: `where(PP=0, EP=None, phase="F")` in, the nodes of a graph that match out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from piper.errors import Call, SelectError, did_you_mean, user_source
from piper.ir.form.python_code import keywords_code
from piper.ir.nodes import PHASES, Chunk, Comm, Node

if TYPE_CHECKING:
    from piper.ir.graph import Graph

ANY = "*"


class Selector(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conditions on tags (a value, `"*"` any value, None absent), phase and kind of Comm."""

    tags: tuple[tuple[str, int | str | None], ...] = ()
    phase: str | None = None
    comm: str | None = None

    def __str__(self) -> str:
        words = keywords_code(dict(self.tags))
        words += [f"phase={self.phase!r}"] if self.phase else []
        words += [f"comm={self.comm!r}"] if self.comm else []
        return f"where({', '.join(words)})"

    as_code = __str__

    def matches(self, node: Node) -> bool:
        if isinstance(node, Chunk):
            if self.comm or (self.phase and (node.serves or node.phase) != self.phase):
                return False
        elif isinstance(node, Comm):
            if self.phase or (self.comm is None) or self.comm not in (ANY, node.comm):
                return False
        else:
            return False
        for tag, wanted in self.tags:
            value = node.tag(tag)
            if (value is None) if wanted == ANY else (value != wanted):
                return False
        return True


def where(*, phase: str | None = None, comm: str | None = None, **tags: Any) -> Selector:
    """Select nodes by tag: `where(PP=0)`, `where(PP="*", EP=None)`, `where(MB=1, phase="B")`."""
    if phase not in (None, *PHASES):
        call = Call("where", user_source())
        raise SelectError(f"no phase {phase!r}", call=call, legal="phase F, B, BI or BW")
    for tag, value in tags.items():
        if value is not None and value != ANY and not isinstance(value, int):
            raise SelectError(
                f"{tag}={value!r} is not a tag value",
                call=Call("where", user_source()),
                legal='an integer, "*" or None',
            )
    return Selector(tuple(tags.items()), phase, comm)


def select(graph: Graph, selector: Selector, *, call: Call) -> list[str]:
    """Names of the nodes that match, in graph order; raises if a tag is unknown or nothing matches."""
    known = graph.tag_values
    for tag, wanted in selector.tags:
        if tag not in known and wanted is not None:
            raise SelectError(
                f"no node has the tag {tag!r}{did_you_mean(tag, sorted(known))}",
                call=call,
                details=[f"in {selector}"],
                legal=_legal(known),
            )
    names = matching(graph, selector)
    if not names:
        phases = _phases(graph, selector) if selector.phase else []
        legal = f"phase {', '.join(phases)}" if phases else _legal(known)
        raise SelectError(f"{selector} selects nothing", call=call, legal=legal)
    return names


def matching(graph: Graph, selector: Selector) -> list[str]:
    """Names of the nodes that match, in graph order, or none."""
    return [name for name in _candidates(graph, selector) if selector.matches(graph.nodes[name])]


def _phases(graph: Graph, selector: Selector) -> list[str]:
    """Phases in which there are chunks with the selector's tags."""
    return [p for p in PHASES if matching(graph, msgspec.structs.replace(selector, phase=p))]


def _candidates(graph: Graph, selector: Selector) -> list[str]:
    """A list that surely holds all matches: the nodes with the values that the selector names."""
    fixed = [(tag, wanted) for tag, wanted in selector.tags if isinstance(wanted, int)]
    if not fixed:
        return list(graph.nodes)
    if len(fixed) == 1:
        return graph.by_tag.get(fixed[0], [])
    index = graph.by_tags(tuple(tag for tag, _ in fixed))
    return index.get(tuple(wanted for _, wanted in fixed), [])


def _legal(known: dict[str, list[int]]) -> str:
    if not known:
        return "where(): the model has no tags"
    parts = []
    for tag, values in sorted(known.items()):
        span = f"{values[0]}..{values[-1]}" if len(values) > 1 else f"{values[0]}"
        parts.append(f"{tag}={span}")
    return ", ".join(parts)
