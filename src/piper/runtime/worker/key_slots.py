"""Keys: the numbers that a rank's random operations draw from, new in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from piper.plan.keys import indexes_in, key_of
from piper.plan.types import Plan, RankPlan
from piper.runtime.worker.to_device import lent, to_device

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker


@dataclass
class Steps:
    """Of all plans that train the same parameters: how many have begun, how many have ended, the number
    (from 1 on) of the last one that has changed a buffer, whether one is under way or has failed, and
    who made the last one that was not."""

    begun: int = 0
    finished: int = 0
    folded: int = 0
    under_way: bool = False
    last: Worker | None = None


class Keys:
    """Fills the slots of kind `key`, by the number of the step."""

    def __init__(self, plan: Plan, me: RankPlan, device: torch.device, steps: Steps) -> None:
        self.seed = plan.seed
        self.device = device
        self.steps = steps
        first = me.data_rank * plan.num_microbatches  # global microbatches of this rank start here
        self.slots = [
            (number, indexes_in(slot.source), first + slot.microbatch)
            for number, slot in enumerate(me.slots)
            if slot.kind == "key"
        ]

    def load(self, slots: list[Any]) -> None:
        """Begin a step: all keys in one copy to the device."""
        if self.slots:
            numbers = [
                key_of(self.seed, step=self.steps.begun, index=index, microbatch=microbatch)
                for _, indexes, microbatch in self.slots
                for index in indexes
            ]
            given = lent(torch.tensor(numbers, dtype=torch.int64), self.device)
            keys = to_device(given, self.device)
            sizes = [len(indexes) for _, indexes, _ in self.slots]
            for (number, _, _), part in zip(self.slots, keys.split(sizes), strict=True):
                slots[number] = part
        self.steps.begun += 1
