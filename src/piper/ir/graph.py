"""The Graph: an immutable DAG of nodes and Values, with the edges that its parts imply."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from piper.ir.communication import communication
from piper.ir.form.card import text_card
from piper.ir.form.screen import listed, on_a_screen
from piper.ir.nodes import Chunk, Comm, Node, Update
from piper.ir.select import Selector
from piper.ir.values import Value
from piper.mesh import Mesh, Slice

VERSION = 2


class Stream(msgspec.Struct, frozen=True, omit_defaults=True):
    """A named in-order queue on each device."""

    name: str
    priority: Literal["normal", "high"] = "normal"
    max_sms: int | None = None


def stream_called(declared: Sequence[Stream], name: str) -> Stream:
    """A stream that was declared, or a part of one (`name:1`), or a new one."""
    for known in (name, name.partition(":")[0]):
        for stream in declared:
            if stream.name == known:
                return msgspec.structs.replace(stream, name=name)
    return Stream(name)


class Split(msgspec.Struct, frozen=True):
    """The batch was cut into `num` along a tag."""

    tag: str
    num: int
    origin: int


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Groups in sequence, as `order` was told; `only` restricts them to one slice.

    A group has members that take turns; a member is a sequence of selectors.
    """

    groups: tuple[tuple[tuple[Selector, ...], ...], ...]
    origin: int
    only: Slice | None = None


class OrderEdge(msgspec.Struct, frozen=True, omit_defaults=True):
    """`before` is complete before `after` starts on their slice, because directive `origin` says so.

    With `issued` it is enough that `before` was dispatched.
    """

    before: str
    after: str
    origin: int
    issued: bool = False


class Graph(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """All computation and all communication of one training step.

    Nodes stand in a topological order. *Logical*: tags, slices, owners and orders, as directives set
    them. *Physical*: every Value is where its readers are, every Comm is a node.
    """

    level: Literal["logical", "physical"]
    nodes: dict[str, Node]
    values: dict[str, Value]
    mesh: Mesh = Mesh()
    streams: tuple[Stream, ...] = ()
    splits: tuple[Split, ...] = ()
    orders: tuple[Order, ...] = ()
    edges: tuple[OrderEdge, ...] = ()
    overlaps: tuple[tuple[str, ...], ...] = ()  # chunks that take turns, in the order chosen
    loss: str = ""  # the traced name of the loss, and of its count if `step` returns one
    count: str = ""
    metrics: tuple[str, ...] = ()  # what else it returns, by name
    version: int = VERSION

    # Directives that keep tags share these indexes with their result (see `replacing`).
    @cached_property
    def by_tag(self) -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for pair in node.tags:
                found[pair].append(node.name)
        return dict(found)

    @cached_property
    def tag_values(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for tag, value in sorted(self.by_tag):
            found[tag].append(value)
        return dict(found)

    def by_tags(self, tags: tuple[str, ...]) -> dict[tuple[int | None, ...], list[str]]:
        """Nodes by their values of several tags; made once per set of tags."""
        known = self.__dict__.setdefault("by_tags_of", {})
        if tags not in known:
            found: dict[tuple[int | None, ...], list[str]] = defaultdict(list)
            for node in self.nodes.values():
                values = dict(node.tags)
                found[tuple(values.get(tag) for tag in tags)].append(node.name)
            known[tags] = dict(found)
        return known[tags]

    @cached_property
    def producers(self) -> dict[str, list[str]]:
        """Value -> nodes that write it: one, or every Accumulate that adds into a sum. A Value that is
        another one in a layout of its own has the writers of that."""
        found: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for value in node.outputs:
                found[value].append(node.name)
        for name, made in self.sources.items():
            if made in found:
                found[name] = found[made]
        return dict(found)

    @cached_property
    def sources(self) -> dict[str, str]:
        """Value that is another one in a layout of its own -> the one that nodes make."""
        found = {}
        for name, value in self.values.items():
            made = value.source
            while made and self.values[made].source:
                made = self.values[made].source
            if made:
                found[name] = made
        return found

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for value in dict.fromkeys(node.inputs):
                found[value].append(node.name)
                if value in self.sources:
                    found[self.sources[value]].append(node.name)
        return dict(found)

    def is_of_a_step(self, node: Comm) -> bool:
        """Whether a communication belongs to a step's state, and does not follow from one chunk."""
        of_a_step = communication(node.comm).of_a_step
        return of_a_step and not self.values[node.inputs[0]].cut

    def predecessors(self, node: Node) -> list[str]:
        """Nodes that must be complete before this one: producers, and readers of what it updates."""
        found = [name for value in node.inputs for name in self.producers.get(value, ())]
        if isinstance(node, Update):
            for param in node.params:
                found += [n for n in self.readers.get(param, ()) if n != node.name]
        return list(dict.fromkeys(found))

    @property
    def chunks(self) -> list[Chunk]:
        return [node for node in self.nodes.values() if isinstance(node, Chunk)]

    @property
    def comms(self) -> list[Comm]:
        return [node for node in self.nodes.values() if isinstance(node, Comm)]

    def headline(self) -> str:
        """How large it is, in a line."""
        nodes = f"{len(self.nodes)} nodes, {len(self.values)} Values"
        return f"{self.level} graph of {nodes}, mesh {self.mesh}"

    def __repr__(self) -> str:
        """What it has of which kind, and the first nodes, as far as they fit a screen."""
        kinds: Counter[str] = Counter()
        for node in self.nodes.values():
            kinds[node.phase if isinstance(node, Chunk) else _kind(node)] += 1
        counts = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
        lines = [f"Graph: {self.headline()}", f"  {counts}", *listed(list(self.nodes))]
        return on_a_screen(lines, more="piper.ir.form.graph_text.graph_to_text(graph)")

    def _repr_html_(self) -> str:
        """For notebooks: the same as a card."""
        return text_card(repr(self))

    def replacing(self, changed: dict[str, Node], values: dict[str, Value] | None = None) -> Graph:
        """The same graph with some nodes (and Values) changed but not retagged; costs what changed."""
        graph = msgspec.structs.replace(
            self,
            nodes={**self.nodes, **changed},
            values={**self.values, **values} if values else self.values,
        )
        for name in ("by_tag", "tag_values", "by_tags_of"):
            if name in self.__dict__:
                graph.__dict__[name] = self.__dict__[name]
        return graph

    @property
    def num_microbatches(self) -> int:
        total = 1
        for split in self.splits:
            total *= split.num
        return total

    def microbatch(self, node: Node) -> int:
        """Which microbatch of its data rank a node works on."""
        index = 0
        for split in self.splits:
            index = index * split.num + (node.tag(split.tag) or 0)
        return index


def _kind(node: Node) -> str:
    return node.comm if isinstance(node, Comm) else type(node).__name__
