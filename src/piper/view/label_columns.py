"""Label columns: the labels of tracks in; columns of what each is of, out, equal lists once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.observe.pictures.styles import STYLES, short_name, style_of
from piper.observe.timeline import Label, Track
from piper.view.columns import Columns, Ref

_PLACES = {style.meaning: place for place, style in enumerate(STYLES.values())}
NONE = -1


class LabelColumns(msgspec.Struct, frozen=True):
    """A row per label; texts by their number. `style` is the place in the table of styles."""

    name: Ref
    short: Ref
    kind: Ref
    stream: Ref
    phase: Ref
    style: Ref
    microbatch: Ref
    origin: Ref
    nbytes: Ref
    talks: Ref
    receives: Ref


class LabelTables:
    """Tracks of one class share their labels, but for who meets."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.lists: list[LabelColumns] = []
        self._numbers: dict[tuple[Label, ...], int] = {}

    def number(self, track: Track) -> int:
        """Of a track's list."""
        labels = tuple(
            msgspec.structs.replace(label, meeting="yes") if label.meeting else label
            for label in track.labels
        )
        found = self._numbers.setdefault(labels, len(self.lists))
        if found == len(self.lists):
            self.lists.append(_columns(self.columns, labels))
        return found


def _columns(columns: Columns, labels: Sequence[Label]) -> LabelColumns:
    return LabelColumns(
        name=columns.texts(label.name for label in labels),
        short=columns.texts(short_name(label) for label in labels),
        kind=columns.texts(label.kind for label in labels),
        stream=columns.texts(label.stream for label in labels),
        phase=columns.texts(label.phase for label in labels),
        style=columns.counts([_PLACES[style_of(label).meaning] for label in labels]),
        microbatch=columns.column("i", (_number(label.microbatch) for label in labels)),
        origin=columns.column("i", (label.origin for label in labels)),
        nbytes=columns.counts([label.nbytes for label in labels]),
        talks=columns.counts([int(label.communicates) for label in labels]),
        receives=columns.counts([int(label.receives) for label in labels]),
    )


def _number(found: int | None) -> int:
    return NONE if found is None else found
