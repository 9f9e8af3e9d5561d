"""Machine: what a device, its host and its links can do: what the simulator knows of hardware."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.errors import FileError


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a rank reaches others: seconds for the smallest exchange, bytes a second each way, and the
    share of the device that moving takes away from computation."""

    latency: float
    bandwidth: float
    share: float = 0.0


class Linear(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of a kind of work: a fixed part, and one for each byte touched or moved. `share` is what
    communication takes of the device meanwhile."""

    fixed: float = 0.0
    per_byte: float = 0.0
    share: float = 0.0

    def __call__(self, nbytes: float) -> float:
        return self.fixed + self.per_byte * nbytes


class Machine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of rank and its links: `node` between the `ranks_per_node` ranks of a node, `network`
    between nodes.

    Where the `host_computes`, as on a CPU, it runs every task itself and only communication goes on
    beside; else it hands tasks to a device's streams, `dispatch` seconds each. A communication whose
    peers are not there yet `holds_share` of the device, or not. What was measured comes before what is
    estimated: seconds of `bodies` by their hash, and of `kinds` of tasks by bytes.
    """

    name: str
    flops: dict[str, float]  # dtype -> operations a second that matrix products reach
    bandwidth: float  # bytes a second, of the device's own memory
    node: Link
    network: Link
    ranks_per_node: int
    launch: float = 0.0  # what the smallest piece of work takes
    dispatch: float = 0.0
    exchange: float = 0.0  # of the host, for starting a communication
    between: float = 0.0  # of the host, from one step to the next
    sms: int = 0  # that `max_sms` of a stream are a part of
    host_computes: bool = False
    holds_share: bool = True
    source: str = ""  # where the figures come from
    bodies: dict[str, float] = {}
    kinds: dict[str, Linear] = {}

    def __post_init__(self) -> None:
        for name in ("bandwidth", "ranks_per_node"):
            if not getattr(self, name) > 0:
                raise FileError(f"machine {self.name}: {name} is {getattr(self, name)}")
        for link in (self.node, self.network):
            if not (link.bandwidth > 0 and link.latency >= 0 and 0 <= link.share < 1):
                raise FileError(f"machine {self.name}: {link} is no link")

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest that a group of ranks goes through."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.node if len(nodes) == 1 else self.network

    def compute_seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """Of so much work, where nobody has measured it."""
        rate = self.flops.get(dtype) or self.flops.get("float32") or max(self.flops.values())
        return self.launch + max(flops / rate, nbytes / self.bandwidth)
