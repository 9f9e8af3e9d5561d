"""Position: where training stands in its data, as JSON, and where every reader begins by it."""

from __future__ import annotations

from typing import Any

import msgspec

from piper.errors import RunError
from piper.runtime.launch.marks import Mark


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """After `steps` steps, on `samples` samples of the global stream: whatever the number of data ranks
    and the size of batches are from here on, the next sample is the one after those.

    `epoch`, `sample` and `mixed` are those of a Mark. `states` has what loaders say of themselves: of
    each data rank's, or with `whole` of the one that gives global batches.
    """

    steps: int = 0
    samples: int = 0
    epoch: int | None = None
    sample: int = 0
    mixed: bool = False
    whole: bool = False
    states: tuple[dict[str, Any], ...] = ()

    def marks(self, num_data_ranks: int, *, whole: bool) -> list[Mark]:
        """Where the readers of data ranks begin, or with `whole` one of global batches: by the states of
        as many loaders, else by the samples."""
        num = 1 if whole else num_data_ranks
        fit = self.whole == whole and len(self.states) == num
        states = self.states if fit else (None,) * num
        return [
            Mark(
                samples=self.samples,
                epoch=self.epoch,
                sample=self.sample,
                mixed=self.mixed,
                state=state,
            )
            for state in states
        ]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Position:
        try:
            return msgspec.json.decode(data, type=Position)
        except msgspec.DecodeError as error:
            raise RunError(f"no position in the data: {error}") from None
