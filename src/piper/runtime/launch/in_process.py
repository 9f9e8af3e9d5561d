"""InProcessPool: Members of this process; SinglePool: one of them, on a device of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.runtime.launch.member import Member
from piper.runtime.launch.pool import Reading
from piper.runtime.transport.transport import Exchange, Pending, Transport


class InProcessPool:
    """Members that are called directly: what they raise comes as it is, and ends nothing."""

    reading: Reading = "driver"
    sends = False

    def __init__(self, num_ranks: int, *, device: str, transport: Transport) -> None:
        self.num_ranks = num_ranks
        self.device = device
        place = device if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
        self.members = [
            Member(rank, device=place, transport=transport) for rank in range(num_ranks)
        ]

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.num_ranks)

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        if not self.members:
            raise RunError("the pool is closed", legal="a new one")
        pairs = zip(self.members, payloads, strict=True)
        return [getattr(member, command)(payload) for member, payload in pairs]

    def close(self) -> None:
        self.members.clear()


class SinglePool(InProcessPool):
    """The one rank of a plan, on the CPU or on a card."""

    def __init__(self, num_ranks: int = 1, *, device: str = "cpu") -> None:
        if num_ranks != 1:
            raise RunError(
                f"the plan has {num_ranks} ranks", legal="launch local, or a plan of one rank"
            )
        super().__init__(1, device=device, transport=_Alone())


class _Alone:
    """The transport of a rank that has no peers."""

    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        raise AssertionError(f"{exchange.task.name} communicates, but there is one rank")
