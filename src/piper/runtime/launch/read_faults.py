"""Read faults: what to do about batches that cannot be read, and what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from piper.errors import RunError

PAUSE_SECONDS = 0.1  # before the first time that something is read again; doubled each time
LONGEST_SECONDS = 10.0


class ReadPolicy(msgspec.Struct, frozen=True):
    """A batch is tried `again` so many times; then up to `skip` global batches are left out. The data is
    read `epochs` times. Of `partial` batches, smaller than the example batch, those that do not divide
    are left out ("train"), or all of them ("drop"); or they are given as they come ("refuse")."""

    again: int = 0
    skip: int = 0
    epochs: int = 1
    partial: Literal["refuse", "train", "drop"] = "refuse"


class Unreadable(Exception):
    """A batch that was tried often enough; its reader stands behind it."""


@dataclass
class ReadFaults:
    """Of one training: how often something was read again, why batches were left out, and the samples
    of those that were smaller than others."""

    policy: ReadPolicy
    retried: int = 0
    left_out: list[str] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)

    def leave_out(self, by_rank: Mapping[int, str]) -> None:
        """The n-th batch is left out on all ranks, since these could not read it."""
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in by_rank.items())
        if len(self.left_out) == self.policy.skip:
            raise RunError(
                f"a batch cannot be read, and {self.policy.skip} are left out already: {text}",
                legal="data that can be read, or skip_unreadable=N for more",
            )
        self.left_out.append(text)


def pause(attempt: int) -> float:
    return min(LONGEST_SECONDS, PAUSE_SECONDS * 2.0**attempt)
