"""Lent: other values in the memory of a worker's parameters, until it gets its own back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker


class Lent:
    """`elements` are by the keys of the rank's holdings. Whoever shows the parameters sees them."""

    def __init__(self, worker: Worker, elements: Mapping[str, Tensor]) -> None:
        self.device = worker.device
        held = (h for h in worker.holdings if h.what == "param" and h.key in elements)
        places = ((worker.held(h), elements[h.key]) for h in held)
        self.wait()
        self.own: list[tuple[Tensor, Tensor]] = []
        for place, value in places:
            assert place is not None and place.is_contiguous()
            self.own.append((place, place.clone()))
            place.copy_(value.view(place.shape))
        self.wait()

    def give_back(self) -> None:
        self.wait()
        for place, own in self.own:
            place.copy_(own)
        self.wait()

    def wait(self) -> None:
        """For the plan's streams, or for copies that they would read too early."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
