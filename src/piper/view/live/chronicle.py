"""Chronicle: what happens in a training in; all of it so far, or what is new since a moment, out."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from piper.view.live.curve import Curve

RECENT = 2048  # events that a reader may be behind; who is further gets the whole chronicle
NOTES = 200
Event = tuple[str, Any]  # what happened, and JSON of it


class News(NamedTuple):
    """Events, the moment after them, and whether there will be no more."""

    events: list[Event]
    moment: int
    is_last: bool


class Chronicle:
    """Written by one thread, read by many. None waits for another longer than it takes to copy what is
    there, and a reader that does not read takes no memory."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = defaultdict(Curve)
        self._notes: deque[Any] = deque(maxlen=NOTES)
        self._latest: dict[str, Any] = {}  # of other events
        self._recent: deque[Event] = deque(maxlen=RECENT)
        self._moment = 0  # events so far
        self._ended = False
        self._changed = threading.Condition()

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Training begins after a step: what is known of later ones is void."""
        with self._changed:
            for curve in self._curves.values():
                curve.cut(step)
            self._latest["facts"] = facts
            self._recent.clear()  # readers begin again, with the whole
            self._moment += 1
            self._changed.notify_all()

    def numbers(self, step: int, values: Mapping[str, float | None], **more: Any) -> None:
        """A point of each curve."""
        with self._changed:
            for name, value in values.items():
                self._curves[name].add(step, value)
            self._tell("numbers", {"step": step, "values": dict(values), **more})

    def note(self, facts: Mapping[str, Any]) -> None:
        with self._changed:
            self._notes.append(facts)
            self._tell("note", facts)

    def set(self, name: str, facts: Mapping[str, Any]) -> None:
        """What holds until it is set again."""
        with self._changed:
            self._latest[name] = facts
            self._tell(name, facts)

    def _tell(self, name: str, facts: Any) -> None:
        self._recent.append((name, facts))
        self._moment += 1
        self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will happen."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def since(self, moment: int, *, within: float) -> News:
        """What has happened since a moment, as soon as something has; all of it at moment -1."""
        with self._changed:
            self._changed.wait_for(lambda: self._moment != moment or self._ended, within)
            behind = self._moment - moment
            events = list(self._recent)
            if moment < 0 or behind > len(events):
                return News(self._whole(), self._moment, self._ended)
            return News(events[len(events) - behind :], self._moment, self._ended)

    def _whole(self) -> list[Event]:
        curves = {name: curve.points for name, curve in self._curves.items()}
        notes: list[Event] = [("note", note) for note in self._notes]
        return [("curves", curves), *notes, *self._latest.items()]
