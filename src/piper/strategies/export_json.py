"""to_json: a program in, its strategy in the published JSON form out, where it has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from piper.directives.declare_mesh import DeclareMesh
from piper.directives.declare_stream import DeclareStream
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.shard import MAX_LOAD, Shard
from piper.directives.split import Split
from piper.errors import StrategyError
from piper.ir.form.byte_sizes import parse_size
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.select import ANY, Selector, where
from piper.mesh import Slice
from piper.strategies.published import MEGABYTE, filter_of

JsonEntry = dict[str, Any]


class _Program(Protocol):
    @property
    def graph(self) -> Graph: ...
    @property
    def history(self) -> Sequence[Record]: ...


def to_json(program: _Program) -> str:
    """The directives of a program as a file of the published form; raises at the first without one."""
    entries = _Export(program.graph, program.history).entries()
    return "[" + ",\n ".join(json.dumps(entry) for entry in entries) + "]\n"


class _Export:
    """The entries of all directives, one after the other."""

    def __init__(self, graph: Graph, history: Sequence[Record]) -> None:
        self.graph = graph
        self.history = history
        self.places = [r.directive for r in history if isinstance(r.directive, Place)]
        self.writers: dict[type, Callable[[int, Record, Any], Iterator[JsonEntry]]] = {
            DeclareMesh: self._mesh,
            DeclareStream: self._stream,
            Place: self._place,
            Replicate: self._replicate,
            Shard: self._shard,
            Split: self._split,
            Order: self._order,
        }

    def entries(self) -> list[JsonEntry]:
        entries: list[JsonEntry] = []
        for origin, record in enumerate(self.history):
            write = self.writers.get(type(record.directive))
            if write is None:
                self._refuse(record, "there is no such directive in the published form")
            entries += write(origin, record, record.directive)
        return entries

    def _refuse(self, record: Record, why: str) -> NoReturn:
        raise StrategyError(
            f"this has no published form: {why}", call=record.call, details=[str(record)]
        )

    def _mesh(self, origin: int, record: Record, mesh: DeclareMesh) -> Iterator[JsonEntry]:
        yield from ()  # lists of devices say it all

    def _stream(self, origin: int, record: Record, stream: DeclareStream) -> Iterator[JsonEntry]:
        _, options = stream.arguments()
        if options:
            self._refuse(record, f"a stream has no {', '.join(options)} there")
        yield from ()  # declared by whoever names it

    def _place(self, origin: int, record: Record, place: Place) -> Iterator[JsonEntry]:
        yield {
            "op": "place",
            "filter": self._filter(record, place.selector),
            "devices": self._devices(place.at),
            **_named(stream=place.stream),
        }

    def _replicate(self, origin: int, record: Record, copied: Replicate) -> Iterator[JsonEntry]:
        _, options = copied.arguments()
        more = [field for field in options if field in ("prefetch", "reduce_every", "reuse")]
        if more:
            self._refuse(record, f"there is no {', '.join(more)}")
        if copied.zero == 1:
            self._refuse(record, "there is zero=0, 2 and 3")
        published = _named(
            reduce_stream=copied.reduce_stream,
            gather_stream=copied.gather_stream,
            bucket_size=_megabytes(copied.bucket_size, record),
            shard_grads=copied.zero >= 2 or None,
            shard_params=copied.zero == 3 or None,
        )
        yield from self._over_groups(record, "replicate", copied, published)

    def _shard(self, origin: int, record: Record, shard: Shard) -> Iterator[JsonEntry]:
        if shard.max_load != MAX_LOAD:
            self._refuse(record, "there is no max_load")
        yield from self._over_groups(record, "shard", shard, _named(stream=shard.stream))

    def _split(self, origin: int, record: Record, split: Split) -> Iterator[JsonEntry]:
        selected = self._filter(record, split.selector)
        yield {
            "op": "split",
            "filter": selected,
            "dim_name": split.tag,
            "num_microbatches": split.num,
        }

    def _order(self, origin: int, record: Record, asked: Order) -> Iterator[JsonEntry]:
        """One entry, or one per row of a table; what no chunk answers to is left out."""
        for order in self.graph.orders:
            if order.origin == origin:
                groups = [
                    [
                        self._filter(record, one)
                        for member in group
                        for one in member
                        if one.comm or self._selects(one)
                    ]
                    for group in order.groups
                ]
                groups = [group for group in groups if group]
                if len(groups) > 1:
                    yield {"op": "order", "filters": groups}

    def _over_groups(
        self,
        record: Record,
        op: str,
        owner: Replicate | Shard,
        options: JsonEntry,
    ) -> Iterator[JsonEntry]:
        """The entry of each place that the selector meets, since devices are named there."""
        mesh = self.graph.mesh
        axes = {owner.over} if isinstance(owner.over, str) else set(owner.over)
        for place in self.places or [Place(where(), Slice())]:
            at = place.at
            both = _both(owner.selector, place.selector)
            if both is None or not self._selects(both):
                continue
            missed = [a for a in mesh.free(at) if a not in axes and mesh.size_of((a,)) > 1]
            if missed and mesh.size_of(tuple(axes)) > 1:
                why = f"{op} goes over all devices of a place there, but {','.join(missed)} is left out"
                self._refuse(record, why)
            if not missed:
                selected = self._filter(record, both)
                yield {"op": op, "filter": selected, "devices": self._devices(at), **options}

    def _devices(self, at: Slice) -> list[int]:
        return list(self.graph.mesh.ranks(at))

    def _selects(self, selector: Selector) -> bool:
        return any(selector.matches(node) for node in self.graph.nodes.values())

    def _filter(self, record: Record, selector: Selector) -> JsonEntry:
        if selector.comm:
            self._refuse(record, "a filter selects no communication there")
        return filter_of(selector)


def _named(**fields: Any) -> JsonEntry:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _megabytes(size: int | str | None, record: Record) -> int | float | None:
    if size is None:
        return None
    megabytes = parse_size(size, call=record.call) / MEGABYTE
    return int(megabytes) if megabytes == int(megabytes) else megabytes


def _both(one: Selector, other: Selector) -> Selector | None:
    """The selector of what both select; None if that is surely nothing."""
    tags = dict(one.tags)
    for tag, wanted in other.tags:
        mine = tags.get(tag, wanted)
        if mine != wanted and (ANY not in (mine, wanted) or None in (mine, wanted)):
            return None
        tags[tag] = wanted if mine == ANY else mine
    if one.phase and other.phase and one.phase != other.phase:
        return None
    return Selector(tuple(tags.items()), one.phase or other.phase, one.comm or other.comm)
