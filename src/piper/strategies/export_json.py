"""to_json: a program in, its strategy in the published JSON form out, where it has one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

from piper import schedules
from piper.errors import StrategyError
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.select import ANY, Selector, where
from piper.mesh import Mesh, Slice
from piper.strategies.published import MEGABYTE, filter_of


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
    def __init__(self, graph: Graph, history: Sequence[Record]) -> None:
        self.graph = graph
        self.history = history
        self.calls = [_arguments(record, graph.mesh) for record in history]
        self.places = [
            (args[0], args[1])
            for record, (args, _) in zip(history, self.calls, strict=True)
            if record.call.name == "place"
        ]

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for origin, record in enumerate(self.history):
            write = getattr(self, f"_{record.call.name}", None)
            if write is None:
                self._refuse(record, "there is no such directive in the published form")
            found += write(origin, record, *self.calls[origin])
        return found

    def _refuse(self, record: Record, why: str) -> NoReturn:
        raise StrategyError(
            f"this has no published form: {why}", call=record.call, details=[str(record)]
        )

    def _mesh(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        yield from ()  # lists of devices say it all

    def _stream(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        if kwargs:
            self._refuse(record, f"a stream has no {', '.join(kwargs)} there")
        yield from ()  # declared by whoever names it

    def _place(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        selector, at = args
        self._check(record, kwargs, ("stream",))
        yield {
            "op": "place",
            "filter": self._filter(record, selector),
            "devices": self._devices(at),
            **kwargs,
        }

    def _replicate(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        known = ("over", "zero", "reduce_stream", "gather_stream", "bucket_size")
        self._check(record, kwargs, known)
        options: dict[str, Any] = {}
        for field in ("reduce_stream", "gather_stream"):
            if kwargs.get(field) is not None:
                options[field] = kwargs[field]
        if kwargs.get("bucket_size") is not None:
            size = kwargs["bucket_size"] / MEGABYTE
            options["bucket_size"] = int(size) if size == int(size) else size
        zero = kwargs.get("zero", 0)
        if zero == 1:
            self._refuse(record, "there is zero=0, 2 and 3")
        options |= {"shard_grads": True} if zero >= 2 else {}
        options |= {"shard_params": True} if zero == 3 else {}
        yield from self._over_groups(record, "replicate", args[0], kwargs["over"], options)

    def _shard(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        self._check(record, kwargs, ("over", "stream"))
        options = {"stream": kwargs["stream"]} if kwargs.get("stream") else {}
        yield from self._over_groups(record, "shard", args[0], kwargs["over"], options)

    def _split(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        selector, tag, num = args
        found = self._filter(record, selector)
        yield {"op": "split", "filter": found, "dim_name": tag, "num_microbatches": num}

    def _order(
        self, origin: int, record: Record, args: Any, kwargs: Any
    ) -> Iterator[dict[str, Any]]:
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
        selector: Selector,
        over: str | Sequence[str],
        options: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """The entry of each place that the selector meets, since devices are named there."""
        mesh = self.graph.mesh
        axes = {over} if isinstance(over, str) else set(over)
        for chosen, at in self.places or [(where(), Slice())]:
            both = _both(selector, chosen)
            if both is None or not self._selects(both):
                continue
            missed = [a for a in mesh.free(at) if a not in axes and mesh.size_of((a,)) > 1]
            if missed and mesh.size_of(tuple(axes)) > 1:
                why = f"{op} goes over all devices of a place there, but {','.join(missed)} is left out"
                self._refuse(record, why)
            if not missed:
                found = self._filter(record, both)
                yield {"op": op, "filter": found, "devices": self._devices(at), **options}

    def _devices(self, at: Slice) -> list[int]:
        return list(self.graph.mesh.ranks(at))

    def _selects(self, selector: Selector) -> bool:
        return any(selector.matches(node) for node in self.graph.nodes.values())

    def _filter(self, record: Record, selector: Selector) -> dict[str, Any]:
        if selector.comm:
            self._refuse(record, "a filter selects no communication there")
        return filter_of(selector)

    def _check(self, record: Record, kwargs: dict[str, Any], known: Sequence[str]) -> None:
        more = [key for key in kwargs if key not in known]
        if more:
            self._refuse(record, f"there is no {', '.join(more)}")


def _arguments(record: Record, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a directive was given: a record's arguments are code."""
    names = {
        "given": lambda *args, **kwargs: (args, kwargs),
        "where": where,
        "mesh": mesh,
        "piper": SimpleNamespace(schedules=schedules, Mesh=Mesh),
    }
    return eval(f"given({record.arguments})", names)


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
