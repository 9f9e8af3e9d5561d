"""Progress: what a training loop must know to go on where another one stopped, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from piper.errors import RunError
from piper.training.position import Position
from piper.training.records import Record


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the data, the learning rate's schedule (encoded as the state of a loader is; None:
    as after so many steps), and the records so far with the seconds that they took."""

    position: Position = Position()
    schedule: dict[str, Any] | None = None
    records: tuple[Record, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> bytes:
        facts = msgspec.structs.asdict(self)
        return msgspec.json.encode({**facts, "records": [r.facts() for r in self.records]})

    @staticmethod
    def from_json(data: bytes) -> Progress:
        try:
            facts = msgspec.json.decode(data)
            facts["records"] = [_numbers(record) for record in facts.get("records", [])]
            return msgspec.convert(facts, Progress)
        except (msgspec.MsgspecError, AttributeError, TypeError) as error:
            raise RunError(f"this is no progress of a training: {error}") from None


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are not finite are texts in JSON."""
    texts = ("nan", "inf", "-inf")
    return {
        key: _numbers(value)
        if isinstance(value, dict)
        else float(value)
        if value in texts
        else value
        for key, value in record.items()
    }
