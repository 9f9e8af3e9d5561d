"""from_json: a strategy in the published JSON form in, a function of directives out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.schedule import Schedule
from piper.directives.shard import Shard
from piper.directives.split import Split
from piper.errors import StrategyError, did_you_mean
from piper.files import read_text
from piper.ir.directive import Directive
from piper.ir.nodes import Chunk
from piper.ir.select import ANY, Selector
from piper.mesh import Mesh
from piper.strategies.published import MEGABYTE, Entry, filters_of, parse, selector_of

_STAGES, _DATA = "pp", "dp"


def from_json(source: str | os.PathLike[str]) -> Callable[[Schedule], None]:
    """The strategy of a file, or of its text.

    Each distinct list of devices is one coordinate of the axis `pp`, and the position in the list is
    that of `dp`. `shard` takes its nodes out of a `replicate` over the same devices.
    """
    name, text = _read(source)
    entries = parse(text, file=name)
    groups = _device_groups(entries, name)

    def strategy(s: Schedule) -> None:
        _Import(s, entries, groups).run()

    return strategy


def _read(source: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(source, str) and source.lstrip()[:1] in ("[", "{"):
        return "strategy", source
    legal = "the path of a file, or its text"
    return os.path.basename(source), read_text(source, error=StrategyError, legal=legal)


def _device_groups(entries: Sequence[Entry], file: str) -> list[tuple[int, ...]]:
    """The distinct lists of devices; they are disjoint and equally long."""
    groups: list[tuple[int, ...]] = []
    for entry in entries:
        devices = entry.devices
        if devices is None or devices in groups:
            continue
        for other in groups:
            both = sorted(set(devices) & set(other))
            if both:
                legal = f"{list(other)} again, or other devices"
                entry.refuse(
                    f"device {both[0]} is also in {list(other)}", field="devices", legal=legal
                )
            if len(devices) != len(other):
                message = f"{len(devices)} devices, but {list(other)} has {len(other)}"
                entry.refuse(message, field="devices", legal="lists of equal length")
        groups.append(devices)
    return groups


class _Import:
    """The directives of all entries, one after the other."""

    def __init__(
        self, s: Schedule, entries: Sequence[Entry], groups: list[tuple[int, ...]]
    ) -> None:
        self.s = s
        self.entries = entries
        self.groups = groups
        self.mesh = Mesh()
        self.chosen: list[tuple[Entry, Selector]] = []

    def run(self) -> None:
        if self.groups:
            axes = {_STAGES: len(self.groups), _DATA: len(self.groups[0])}
            self.mesh = self.s.mesh(**axes)
        split_tags = [entry.fields["dim_name"] for entry in self.entries if entry.op == "split"]
        known = sorted({*self.s.tags, *split_tags})
        for entry in self.entries:
            self._check_tags(entry, known)
        for entry in self.entries:
            self.s.apply(_DIRECTIVES[entry.op](self, entry), call=entry.call)
        for entry, selector in self.chosen:  # once more: a place may come after them
            self._check_group(entry, selector)

    def _check_tags(self, entry: Entry, known: Sequence[str]) -> None:
        for field, selected in filters_of(entry):
            for tag, value in selector_of(selected, entry, field).tags:
                if tag not in known and value is not None:
                    near = did_you_mean(tag, known)
                    legal = f"PASS, {', '.join(known)}"
                    entry.refuse(f"no node has the tag {tag!r}{near}", field=field, legal=legal)

    def _check_group(self, entry: Entry, selector: Selector) -> None:
        """A directive over a group of devices speaks of what is placed there."""
        at = self._at(entry)
        for node in self.s.graph.nodes.values():
            if node.slice not in (None, at) and selector.matches(node):
                assert node.slice is not None
                placed = self.groups[dict(node.slice.fixed)[_STAGES]]
                entry.refuse(
                    f"{node.name} is placed on devices {list(placed)}",
                    field="devices",
                    legal="the devices of its place",
                )

    def _at(self, entry: Entry) -> Any:
        assert entry.devices is not None
        return self.mesh.at(**{_STAGES: self.groups.index(entry.devices)})

    def _stream(self, entry: Entry, field: str) -> str | None:
        name = entry.fields.get(field)
        if name is not None and all(stream.name != name for stream in self.s.graph.streams):
            self.s.stream(name)
        return name

    def place(self, entry: Entry) -> Place:
        selector = selector_of(entry.fields["filter"], entry, "filter")
        return Place(selector, self._at(entry), stream=self._stream(entry, "stream"))

    def replicate(self, entry: Entry) -> Replicate:
        size = entry.fields.get("bucket_size")
        selector = self._without_shards(entry)
        self._check_group(entry, selector)
        self.chosen.append((entry, selector))
        return Replicate(
            selector,
            over=_DATA,
            zero=_zero(entry),
            reduce_stream=self._stream(entry, "reduce_stream"),
            gather_stream=self._stream(entry, "gather_stream"),
            bucket_size=None if size is None else max(1, round(size * MEGABYTE)),
        )

    def shard(self, entry: Entry) -> Shard:
        selector = selector_of(entry.fields["filter"], entry, "filter")
        self._check_group(entry, selector)
        self.chosen.append((entry, selector))
        return Shard(selector, over=_DATA, stream=self._stream(entry, "stream"))

    def split(self, entry: Entry) -> Split:
        selector = selector_of(entry.fields["filter"], entry, "filter")
        return Split(selector, entry.fields["dim_name"], entry.fields["num_microbatches"])

    def order(self, entry: Entry) -> Order:
        groups = [
            [selector_of(selected, entry, "filters") for selected in group]
            for group in entry.fields["filters"]
        ]
        return Order([group[0] if len(group) == 1 else group for group in groups])

    def _without_shards(self, entry: Entry) -> Selector:
        """The selector of a replicate without what a shard over the same devices selects."""
        selector = selector_of(entry.fields["filter"], entry, "filter")
        for other in self.entries:
            if other.op == "shard" and other.devices == entry.devices:
                taken = selector_of(other.fields["filter"], other, "filter")
                selector = self._without(entry, selector, other, taken)
        return selector

    def _without(self, entry: Entry, selector: Selector, other: Entry, taken: Selector) -> Selector:
        if not self._overlap(selector, taken):
            return selector
        own = dict(selector.tags)
        more = [(tag, value) for tag, value in taken.tags if tag not in own or own[tag] != value]
        if len(more) != 1 or more[0][1] != ANY or more[0][0] in own:
            entry.refuse(
                f"entry {other.number} (shard) takes out nodes that no filter can leave out",
                field="filter",
                legal=f"the filter of entry {other.number} without its last tag, which is any",
            )
        return msgspec.structs.replace(selector, tags=(*selector.tags, (more[0][0], None)))

    def _overlap(self, one: Selector, other: Selector) -> bool:
        return any(
            isinstance(node, Chunk) and one.matches(node) and other.matches(node)
            for node in self.s.graph.nodes.values()
        )


def _zero(entry: Entry) -> int:
    if entry.fields.get("shard_grads"):
        return 3 if entry.fields.get("shard_params") else 2
    if entry.fields.get("shard_params"):
        entry.refuse("it goes with shard_grads", field="shard_params", legal="both, or neither")
    return 0


_DIRECTIVES: dict[str, Callable[[_Import, Entry], Directive]] = {
    "place": _Import.place,
    "replicate": _Import.replicate,
    "shard": _Import.shard,
    "split": _Import.split,
    "order": _Import.order,
}
