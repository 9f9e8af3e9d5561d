"""Label lists: the labels of all tracks in; each list once, and who meets on which track, out; and back.

Ranks of a class have the labels of their class, but for the end of a meeting's name, which says by a
first rank who meets (`plan/report/task_labels.py`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import msgspec

from piper.observe.timeline import Label

NOBODY = -1  # whose meeting has no such end
_MEETS = re.compile(r"(.+)@(0|[1-9][0-9]{0,8})", re.DOTALL)


class LabelLists:
    """Of tracks that come one after the other: `lists`, and per track its list and first ranks, none if
    all are NOBODY."""

    def __init__(self) -> None:
        self.lists: list[tuple[Label, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._labels: dict[Label, int] = {}
        self._cut: dict[int, tuple[Label, int, int]] = {}  # by identity: the label, its number, who

    def add(self, labels: Sequence[Label]) -> tuple[int, array[int]]:
        cut = [self._cut.get(id(label)) or self._split(label) for label in labels]
        key = tuple(number for _, number, _ in cut)
        number = self._numbers.setdefault(key, len(self.lists))
        if number == len(self.lists):
            self.lists.append(tuple(_without(label) for label, _, _ in cut))
        firsts = array("i", (first for _, _, first in cut))
        return number, firsts if any(first != NOBODY for first in firsts) else array("i")

    def _split(self, label: Label) -> tuple[Label, int, int]:
        number = self._labels.setdefault(_without(label), len(self._labels))
        meets = _MEETS.fullmatch(label.meeting)
        found = label, number, int(meets[2]) if meets else NOBODY
        self._cut[id(label)] = found
        return found


class LabelsOfTracks:
    """The way back. Equal lists are one, and so are equal labels."""

    def __init__(self, lists: Sequence[tuple[Label, ...]]) -> None:
        self.lists = lists
        self._known: dict[tuple[int, bytes], tuple[Label, ...]] = {}
        self._labels: dict[tuple[int, int, int], Label] = {}

    def of(self, number: int, firsts: array[int]) -> tuple[Label, ...]:
        labels = self.lists[number]
        if not firsts:
            return labels
        key = number, firsts.tobytes()
        if key not in self._known:
            self._known[key] = tuple(
                self._label(label, number, index, first)
                for index, (label, first) in enumerate(zip(labels, firsts, strict=True))
            )
        return self._known[key]

    def _label(self, label: Label, number: int, index: int, first: int) -> Label:
        if first == NOBODY:
            return label
        key = number, index, first
        if key not in self._labels:
            named = f"{label.meeting}@{first}"
            self._labels[key] = msgspec.structs.replace(label, meeting=named)
        return self._labels[key]


def _without(label: Label) -> Label:
    meets = _MEETS.fullmatch(label.meeting)
    return msgspec.structs.replace(label, meeting=meets[1]) if meets else label
